"""Names of policies that were removed."""

from collections.abc import Mapping
from types import MappingProxyType

REMOVED: Mapping[str, str] = MappingProxyType(
    {"balanced": "largest_first", "by_bucket": "contiguous", "split_buckets": "sliced"}
)
"""The replacement of each policy that was removed."""


def removed(name: str) -> str:
    """Return what an error says of a policy that was removed."""
    return f"the policy {name!r} was removed; its replacement is {REMOVED[name]!r}"
