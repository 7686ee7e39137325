"""Means over whoever averages: ranks of a process group, or replicas that are stacked here."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hooks.averaging.compression import Compression, with_error_feedback
from hooks.averaging.pairs import RankPairs
from hooks.averaging.rank_means import RankMeans
from hooks.averaging.stacked import StackedMeans, StackedReplicas
from sharding.transport.groups import resolved

Members = dist.ProcessGroup | StackedReplicas
"""Those who average."""

Means = RankMeans | StackedMeans
"""What takes means over them."""


def members_of(given: dist.ProcessGroup | DeviceMesh | StackedReplicas | None) -> Members:
    """Return the members that a caller's ``process_group`` stands for.

    Raises:
        TypeError, ValueError: as :func:`~sharding.transport.groups.resolved`.
    """
    return given if isinstance(given, StackedReplicas) else resolved(given)


def means_over(
    group: Members, among: Members, *, bucket_bytes: int | None = None, background: bool = False
) -> Means:
    """Return what takes means over a group; of stacked replicas, over every group of its size.

    Args:
        group: who averages together.
        among: all, of whom these are some.
        bucket_bytes: as :class:`RankMeans`'s.
        background: as :class:`RankMeans`'s; where nothing is sent, there is nothing to wait for.
    """
    if isinstance(group, StackedReplicas):
        assert isinstance(among, StackedReplicas), "a part of what is stacked is stacked"
        return StackedMeans(among, group.size())
    return RankMeans(group, bucket_bytes=bucket_bytes, background=background)


def pairs_over(members: Members) -> RankPairs | StackedMeans:
    """Return what takes means over pairs of members.

    Raises:
        ValueError: a group without gloo.
    """
    return StackedMeans(members) if isinstance(members, StackedReplicas) else RankPairs(members)


def agreed(tensors: Sequence[Tensor], members: Members) -> list[Tensor]:
    """Return one member's tensors, which all have; of ranks, a mean finds out if they have.

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
