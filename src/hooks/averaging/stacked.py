"""Replicas in one process: tensors stacked along a new first dimension, and means over it.

What ranks of a process group hold one each, lies here in one tensor, as its slices. Means are those
of ranks bit for bit, as they are sums in the same order, in the same dtypes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hooks.averaging.compression import Compression
from hooks.averaging.rank_means import (
    PendingMean,
    check_has_mean,
    divides_before,
    mean_of_decoded,
)
from sharding.transport.ordered_sum import add_in_rank_order


@dataclass(frozen=True)
class StackedReplicas:
    """Replicas that are the slices of tensors along their first dimension.

    Averagers take it as their ``process_group``, and then average the slices of what they are
    given, in one process and with nothing to be sent: to test and to study training on 2 to 16
    ranks without starting any. Parameters of shape ``s`` are then tensors of shape ``(count, *s)``;
    :class:`~hooks.averaging.ReplicatedModel` makes them.

    Args:
        count: how many replicas.

    Raises:
        ValueError: fewer than one.

    Example::

        >>> from hooks import PeriodicModelAverager
        >>> stacked = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
        >>> PeriodicModelAverager(4, process_group=StackedReplicas(2)).average_parameters([stacked])
        >>> stacked
        tensor([[2., 4.],
                [2., 4.]])

    Reference:
        MaxText's DiLoCo trainer, which stacks the replicas of a run the same way.
    """

    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"count must be a number of replicas from 1 on, got {self.count}")

    def size(self) -> int:
        """Number of replicas, under a process group's name for it."""
        return self.count

    def check(self, tensors: Iterable[Tensor]) -> None:
        """Check that tensors have a slice for each replica.

        Raises:
            ValueError: names the first that has not.
        """
        for place, tensor in enumerate(tensors):
            if tensor.shape[:1] != (self.count,):
                raise ValueError(
                    f"tensor {place} has shape {tuple(tensor.shape)}, its first dimension must be "
                    f"of {self.count}, one slice for each replica: stack them with torch.stack"
                )

    def agreed(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the first replica's slices, which all replicas have in common.

        Raises:
            ValueError: names the replicas that have others.
        """
        self.check(tensors)
        for place, tensor in enumerate(tensors):
            others = [k for k in range(1, self.count) if not torch.equal(tensor[k], tensor[0])]
            if others:
                raise ValueError(
                    f"of tensor {place}, replicas {others} have another slice than replica 0; "
                    "under an outer rule all begin with the same parameters, and keep them the "
                    "same through the warm-up"
                )
        return [tensor[0] for tensor in tensors]


class StackedMeans:
    """Takes means of slices: the same numbers, in the same order, as ranks take them.

    That is, as :class:`~hooks.averaging.rank_means.RankMeans` and
    :class:`~hooks.averaging.pairs.RankPairs`.

    Args:
        replicas: whose slices tensors have.
        group_size: how many neighbours average together, the last group perhaps fewer; None for
            all of them.

    Example::

        >>> means = StackedMeans(StackedReplicas(3), group_size=2)
        >>> means.launch([torch.tensor([1.0, 3.0, 7.0])]).wait()
        [tensor([2., 2., 7.])]
        >>> means.means([2, None, 0], [torch.tensor([1.0, 3.0, 7.0])])
        [tensor([4., 3., 4.])]
    """

    bytes_sent = 0
    """Nothing is sent."""

    def __init__(self, replicas: StackedReplicas, group_size: int | None = None) -> None:
        self._replicas = replicas
        self._group_size = replicas.count if group_size is None else group_size

    @torch.no_grad()
    def launch(self, tensors: Sequence[Tensor], *, mark: object = None) -> PendingMean:
        """Take the mean of each of these tensors.

        Args:
            tensors: each of shape ``(count, ...)``.
            mark: of no use here: one process has nothing to agree on.

        Returns:
            Tensors of the same shapes, each slice the mean of its group; they may share memory
            among slices, and none with what was given.

        Raises:
            TypeError: a tensor whose numbers have no mean.
            ValueError: a tensor without a slice for each replica.
        """
        check_has_mean(tensors)
        self._replicas.check(tensors)
        return PendingMean([self._mean(one) for one in tensors])

    @torch.no_grad()
    def launch_decoded(
        self, compression: Compression, payload: Tensor, out: Tensor, *, mark: object = None
    ) -> PendingMean:
        """Take the mean, over all replicas, of what they would send.

        Args:
            compression: that made the payloads.
            payload: of all replicas, of shape (count, bytes).
            out: of one dimension: the mean will be here.
            mark: of no use here.
        """
        mean_of_decoded(compression, payload, out)
        return PendingMean([out])

    def means(
        self, partners: Sequence[int | None], tensors: Sequence[Tensor], *, mark: object = None
    ) -> list[Tensor]:
        """The mean of each slice and its partner's; a slice itself where it has none.

        Args:
            partners: of each replica.
            tensors: each of shape ``(count, ...)``.
            mark: of no use here.

        Raises:
            ValueError: a tensor without a slice for each replica.
        """
        self._replicas.check(tensors)
        paired = [rank for rank, partner in enumerate(partners) if partner is not None]
        others = [partner for partner in partners if partner is not None]
        found = [tensor.clone() for tensor in tensors]
        for mean, tensor in zip(found, tensors, strict=True):
            mean[paired] = (tensor[paired] + tensor[others]) / 2
        return found

    def _mean(self, stacked: Tensor) -> Tensor:
        groups = stacked.detach().split(self._group_size)
        means = [mean_of_slices(group).expand_as(group) for group in groups]
        return means[0] if len(means) == 1 else torch.cat(means)


def mean_of_slices(stacked: Tensor) -> Tensor:
    """The mean over the first dimension, in memory of its own."""
    rows = stacked.detach().clone(memory_format=torch.contiguous_format)
    real = torch.view_as_real(rows) if rows.is_complex() else rows
    first, *others = (row.view(-1) for row in real)
    before = divides_before(rows.dtype)
    add_in_rank_order(first, 0, others, len(rows) if before else 1)
    return rows[0] if before else rows[0].div_(len(rows))
