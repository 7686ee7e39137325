"""Agreement of ranks before rows move: if a step may go on, and which gradients there are."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from sharding.matrices.exchange import HEADER
from sharding.matrices.shard_group import ShardGroup
from sharding.transport.groups import device_of
from sharding.transport.peers import GroupRank, named
from sharding.zero.collective import exchanged

_Result = TypeVar("_Result")
FAILED = 1


class Attempt:
    """Result of what a rank does between collectives, or its error, until all ranks know of it.

    A rank that fails still takes part in the next collective: the others would wait for it.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None

    def make(self, call: Callable[..., _Result], *args: Any) -> _Result | None:
        """Call a function; None where it, or one before it, has failed."""
        if self.error is not None:
            return None
        try:
            return call(*args)
        except Exception as error:  # noqa: BLE001  raised by raise_failures, once the others know
            self.error = error
            return None

    def header(self, mask: Sequence[bool] = ()) -> bytes:
        """Return what the others are told: if it failed, and a digest of a mask of gradients."""
        digest = hashlib.blake2b(bytes(mask), digest_size=HEADER - 1).digest()
        return bytes([FAILED if self.error is not None else 0]) + digest

    def raise_failures(self, shards: ShardGroup, failed: Sequence[bool], what: str) -> None:
        """Raise this rank's own error, or one that names the ranks that failed.

        Args:
            shards: the ranks.
            failed: of each rank.
            what: the ranks were doing.

        Raises:
            Exception: what this rank has failed by.
            RuntimeError: another rank has failed.
        """
        if self.error is not None:
            raise self.error
        ranks = [GroupRank(rank) for rank, one in enumerate(failed) if one]
        if ranks:
            raise RuntimeError(
                f"{named(shards.group, ranks)} could not {what}, and says why in an error of its "
                "own; this rank has stopped at the same step"
            )


def has_failed(headers: Sequence[bytes]) -> list[bool]:
    """Return for each rank if it has failed."""
    return [one[0] == FAILED for one in headers]


def check_same_gradients(
    shards: ShardGroup, headers: Sequence[bytes], names: Sequence[str], mask: Sequence[bool]
) -> None:
    """Make sure that all ranks have gradients of the same parameters. Collective where they differ.

    Args:
        shards: the ranks.
        headers: of each.
        names: of all parameters.
        mask: of each parameter, True if this rank has its gradient.

    Raises:
        ValueError: on every rank; names the first parameter whose gradient some ranks lack, and
            the ranks.
    """
    if len(set(headers)) == 1:
        return
    device = device_of(shards.group)
    masks = exchanged(shards.group, device, bytes(mask), "compare gradients", len(mask))
    columns = list(zip(*masks, strict=True))
    place = next(k for k, column in enumerate(columns) if len(set(column)) > 1)
    lacking = [GroupRank(rank) for rank, one in enumerate(columns[place]) if not one]
    having = [GroupRank(rank) for rank, one in enumerate(columns[place]) if one]
    raise ValueError(
        f"the parameter at {names[place]!r} has no gradient on {named(shards.group, lacking)}, and "
        f"has one on {named(shards.group, having)}; a gradient is there on all ranks or on none: "
        "set it to None, or to zeros, on every rank"
    )


def vector_with_failures(
    attempt: Attempt, shards: ShardGroup, numbers: torch.Tensor
) -> torch.Tensor:
    """Return a vector with a place for each rank that fails, in front of numbers to be summed."""
    failed = torch.zeros(shards.size, dtype=torch.float64, device="cpu")
    failed[shards.rank] = float(attempt.error is not None)
    return torch.cat([failed, numbers.reshape(-1)]).to(device_of(shards.group))
