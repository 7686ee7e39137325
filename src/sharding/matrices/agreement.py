"""Agreement of ranks on whether a step continues, and on which gradients exist."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sharding.matrices.shard_group import ShardGroup
from sharding.transport.groups import GroupRank, device_of, format_ranks
from sharding.transport.packed import HEADER
from sharding.zero.collective import all_gather_bytes

_Result = TypeVar("_Result")


class Attempt:
    """Calls of one rank between collectives, and the first error of these calls.

    A rank with an error still takes part in the next collective, since other ranks wait for it.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None

    def run(self, call: Callable[..., _Result], *args: Any) -> _Result | None:
        """Call a function, and return the result; None if this or an earlier call failed."""
        if self.error is not None:
            return None
        try:
            return call(*args)
        except Exception as error:  # noqa: BLE001  raised by raise_failures
            self.error = error
            return None

    def header(self, mask: Sequence[bool] = ()) -> bytes:
        """Return a message to other ranks: if this rank failed, and a digest of a gradient mask."""
        digest = hashlib.blake2b(bytes(mask), digest_size=HEADER - 1).digest()
        return bytes([self.error is not None]) + digest

    def raise_failures(self, shards: ShardGroup, failed: Sequence[bool], what: str) -> None:
        """Raise this rank's own error, or RuntimeError that names the ranks that failed."""
        if self.error is not None:
            raise self.error
        ranks = [GroupRank(rank) for rank, one in enumerate(failed) if one]
        if ranks:
            raise RuntimeError(
                f"{format_ranks(shards.group, ranks)} could not {what}, and says why in an error "
                "of its own; this rank has stopped at the same step"
            )


def failed_ranks(headers: Sequence[bytes]) -> list[bool]:
    """Return for each rank True if it failed."""
    return [bool(one[0]) for one in headers]


def check_same_gradients(
    shards: ShardGroup, headers: Sequence[bytes], names: Sequence[str], mask: Sequence[bool]
) -> None:
    """Raise ValueError, on all ranks, if ranks have gradients of different parameters.

    Collective if they do. ``mask`` says for each name if this rank has the gradient.
    """
    if len(set(headers)) == 1:
        return
    device = device_of(shards.group)
    masks = all_gather_bytes(shards.group, device, bytes(mask), "compare gradients", len(mask))
    columns = list(zip(*masks, strict=True))
    place = next(k for k, column in enumerate(columns) if len(set(column)) > 1)
    lacking = [GroupRank(rank) for rank, one in enumerate(columns[place]) if not one]
    having = [GroupRank(rank) for rank, one in enumerate(columns[place]) if one]
    raise ValueError(
        f"the parameter at {names[place]!r} has no gradient on "
        f"{format_ranks(shards.group, lacking)}, and has one on "
        f"{format_ranks(shards.group, having)}; a gradient is there on all ranks or on "
        "none: set it to None, or to zeros, on every rank"
    )
