"""Packs: the leaves that an executor without a table of pointers steps as one.

Large leaves are stepped one by one, where they lie. Small ones that share coefficients are stepped
together: what of them lies side by side, where it lies; the rest is brought together and back.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from functional_optim._torch import foreach_copy_
from functional_optim.core.brief import and_more
from functional_optim.core.stage import Stage, block_size_of
from functional_optim.kernels import Chunks, Leaf
from functional_optim.kernels.chunks import LARGE, flat_view, small_packs, tensors_of, with_tensors
from functional_optim.plan.item import Item


class Pack:
    """Leaves that are stepped as one.

    Args:
        places: of them, among the gradients to come.
        leaves: in one dimension; a placeholder is in the place of each gradient.
    """

    def __init__(self, places: Sequence[int], leaves: Sequence[Leaf]) -> None:
        self.places = list(places)
        name = and_more(leaves[0].name, len(leaves) - 1)
        self.like = leaves[0]._replace(name=name, entries={})
        """What is stepped, but for where it lies: it has the numbers of the next step."""
        columns = list(zip(*map(tensors_of, leaves), strict=True))
        del columns[1]  # gradients come at each step
        self._columns = [list(column) for column in columns]
        self._whole = [_as_one(column) for column in self._columns]

    def step(
        self,
        executor: Chunks,
        stages: Sequence[Stage],
        gradients: Sequence[Tensor],
        totals: Sequence[Tensor],
    ) -> None:
        """Step it, by the numbers of ``like``.

        Args:
            executor: that steps it.
            stages: of the chain.
            gradients: of all leaves that places count; each is laid out as its parameter.
            totals: the sum of each measured stage.
        """
        param, *states = [
            torch.cat(column) if whole is None else whole
            for column, whole in zip(self._columns, self._whole, strict=True)
        ]
        grads = [_flat(gradients[place]) for place in self.places]
        grad = grads[0] if len(grads) == 1 else torch.cat(grads)
        leaf = with_tensors(self.like, [param, grad, *states])
        executor.bind_chunk(stages, leaf, totals)()
        for column, whole, one in zip(self._columns, self._whole, [param, *states], strict=True):
            if whole is None:
                foreach_copy_(column, list(one.split(list(map(Tensor.numel, column)))))


def packs_of(executor: Chunks, stages: Sequence[Stage], items: Sequence[Item]) -> list[Pack]:
    """The packs of a chunk's leaves, whose places count from its first.

    They are those that the executor itself would make of leaves in this order: torch's fused
    kernels round the last elements of a tensor in another way.

    Args:
        executor: that steps them.
        stages: of the chain.
        items: the leaves; each lies densely, in tensors of its own.
    """
    leaves = [_as_lane(item) for item in items]
    places = {id(leaf): place for place, leaf in enumerate(leaves)}
    large: list[Leaf] = []
    small: list[Leaf] = []
    for leaf in leaves:
        # torch's kernels for 16-bit floats round the last elements of a tensor, past its last whole
        # vector, in another way.
        alone = executor.exact and leaf.param.dtype.itemsize <= 2
        (large if alone or leaf.param.numel() >= LARGE else small).append(leaf)
    groups = [[leaf] for leaf in large] + list(small_packs(small, block_size_of(stages)))
    return [Pack([places[id(leaf)] for leaf in group], group) for group in groups]


def _as_lane(item: Item) -> Leaf:
    """A leaf in one dimension, as it lies."""
    param = item.param
    leaf = Leaf(param, param, item.state.stages, (), item.name)
    flat = [flat_view(one, param if one.shape == param.shape else one) for one in tensors_of(leaf)]
    return with_tensors(leaf, [one for one in flat if one is not None])


def _flat(gradient: Tensor) -> Tensor:
    """A gradient without gaps as it lies."""
    if gradient.is_contiguous():
        return gradient.detach().view(-1)
    return gradient.detach().as_strided((gradient.numel(),), (1,))


def _as_one(column: Sequence[Tensor]) -> Tensor | None:
    """Tensors that lie side by side, as one; None where they lie apart."""
    if len(column) == 1:
        return column[0]
    for one, other in pairwise(column):
        end = one.data_ptr() + one.numel() * one.element_size()
        storages = {one.untyped_storage().data_ptr(), other.untyped_storage().data_ptr()}
        if end != other.data_ptr() or len(storages) > 1:
            return None
    first = column[0]
    return first.as_strided((sum(map(Tensor.numel, column)),), (1,), first.storage_offset())
