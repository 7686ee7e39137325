"""Policies: pure functions that give parameters to ranks, one file each."""

from collections.abc import Mapping
from types import MappingProxyType

from sharding.policies.balanced import balanced
from sharding.policies.buckets import ddp_buckets
from sharding.policies.by_bucket import by_bucket
from sharding.policies.contiguous import contiguous
from sharding.policies.elements import elements
from sharding.policies.greedy import greedy
from sharding.policies.hierarchical import WITHIN, hierarchical
from sharding.policies.sliced import sliced
from sharding.policies.split_buckets import split_buckets
from sharding.problem import Policy

__all__ = [
    "POLICIES",
    "balanced",
    "by_bucket",
    "contiguous",
    "ddp_buckets",
    "elements",
    "greedy",
    "hierarchical",
    "sliced",
    "split_buckets",
]

POLICIES: Mapping[str, Policy] = MappingProxyType({**WITHIN, "hierarchical": hierarchical})
"""Every policy, by the name under which ``plan`` takes it."""
