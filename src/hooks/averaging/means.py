"""Means over whoever averages: ranks of a process group, or replicas that are stacked here."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hooks.averaging.channel import PendingMean
from hooks.averaging.compressed_mean import CompressedMean
from hooks.averaging.compression import Compression, with_error_feedback
from hooks.averaging.group_mean import GroupMean, check_bucket_bytes
from hooks.averaging.stacked import (
    StackedCompressedMean,
    StackedMean,
    StackedPairs,
    StackedReplicas,
)
from hooks.averaging.swap import Swap
from sharding.transport.groups import resolved

Members = dist.ProcessGroup | StackedReplicas
"""Those who average."""


class Mean(Protocol):
    """What takes means of tensors of all members."""

    @property
    def bytes_sent(self) -> int:
        """The bytes that this process has sent, headers not counted."""
        ...

    def launch(self, tensors: Sequence[Tensor], *, mark: object = None) -> PendingMean:
        """Begin to take the mean of each; see :meth:`GroupMean.launch`."""
        ...


def members_of(given: dist.ProcessGroup | DeviceMesh | StackedReplicas | None) -> Members:
    """Who is meant by what a caller gave as ``process_group``.

    Raises:
        TypeError, ValueError: as :func:`~sharding.transport.groups.resolved`.
    """
    return given if isinstance(given, StackedReplicas) else resolved(given)


def mean_over(
    group: Members, among: Members, *, bucket_bytes: int | None = None, background: bool = False
) -> Mean:
    """What takes means over a group; of replicas that are stacked, over every group of its size.

    Args:
        group: who averages together.
        among: all, of whom these are some.
        bucket_bytes: as :class:`GroupMean`'s.
        background: as :class:`GroupMean`'s; where nothing is sent, there is nothing to wait for.
    """
    if isinstance(group, StackedReplicas):
        assert isinstance(among, StackedReplicas), "a part of what is stacked is stacked"
        check_bucket_bytes(bucket_bytes)
        return StackedMean(among, group.size())
    return GroupMean(group, bucket_bytes=bucket_bytes, background=background)


def compressed_mean_over(
    members: Members, compression: Compression, *, background: bool
) -> CompressedMean | StackedCompressedMean:
    """What takes means of payloads over all members."""
    if isinstance(members, StackedReplicas):
        return StackedCompressedMean(compression)
    return CompressedMean(members, compression, background=background)


def pairs_over(members: Members) -> Swap | StackedPairs:
    """What takes means over pairs of members.

    Raises:
        ValueError: a group without gloo.
    """
    return StackedPairs(members) if isinstance(members, StackedReplicas) else Swap(members)


def lead_of(members: Members) -> tuple[int, ...]:
    """The dimensions in which members' tensors, as this process has them, exceed one member's."""
    return (members.size(),) if isinstance(members, StackedReplicas) else ()


def agreed(tensors: Sequence[Tensor], members: Members) -> list[Tensor]:
    """One member's tensors, where all have the same; of ranks, a mean finds out whether they have.

    Raises:
        ValueError: of replicas that are stacked here, those that have others.
    """
    return members.agreed(tensors) if isinstance(members, StackedReplicas) else list(tensors)


def encoded(
    compression: Compression, flat: Tensor, residual: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The payload of each vector, with error feedback where there is a residual.

    Args:
        compression: how a vector is sent.
        flat: one of shape (n,), or those of replicas, (count, n).
        residual: of the same shape, what is still to be sent; None where that is forgotten.

    Returns:
        (payload, new residual), with the same leading dimension.
    """
    if flat.dim() == 1:
        if residual is None:
            return compression.encode(flat), None
        return with_error_feedback(compression, flat, residual)
    rows: list[tuple[Tensor, Tensor | None]] = []
    for number, row in enumerate(flat):
        try:
            rows.append(encoded(compression, row, None if residual is None else residual[number]))
        except ValueError as error:
            error.add_note(f"of replica {number}")
            raise
    payloads, residuals = zip(*rows, strict=True)
    return torch.stack(payloads), None if residual is None else torch.stack(residuals)
