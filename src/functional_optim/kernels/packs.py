"""Packs: leaves that an executor steps as one chunk of memory.

Large leaves that fill their memory are stepped one by one, where they lie. Small ones that share
coefficients are stepped together: what of them lies side by side, where it lies; the rest is
brought together and back.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim._torch import foreach_copy_
from functional_optim.core.aliasing import overlaps_itself
from functional_optim.core.brief import and_more
from functional_optim.core.buffer_memory import as_elements, buffer_of
from functional_optim.core.leaf import Leaf
from functional_optim.core.stage import Stage, block_size_of
from functional_optim.kernels.chunks import (
    aliased_places,
    as_chunk,
    counts_without_elements,
    flat_view,
    pack_key,
    tensors_of,
    why_not_flat,
    with_tensors,
)
from functional_optim.kernels.kernel import BindChunk
from functional_optim.kernels.scratch import scratch, views_of_scratch

LARGE = 1 << 16
"""Elements from which a leaf is a chunk of its own: the call is then cheap beside the work."""

PACK = 1 << 20
"""Most elements that are packed into one chunk."""


class _Gathered(NamedTuple):
    """Memory in which leaves are brought together."""

    chunk: Leaf
    """All of them as one leaf."""
    gradients: list[Tensor]
    """The part of its gradient that is each leaf's, laid out as that."""
    moved: list[tuple[list[Tensor], Tensor, list[Tensor]]]
    """What lies apart of each leaf, the tensor of the chunk that it is moved to, and its parts."""


class Pack:
    """Leaves that are stepped as one.

    Args:
        places: of them, among the gradients to come.
        leaves: in any layout; their gradients come at each step.
        dense: of each, whether its tensors and its gradients lie densely, in one order, and none
            in another.
    """

    def __init__(
        self, places: Sequence[int], leaves: Sequence[Leaf], dense: Sequence[bool]
    ) -> None:
        self.places = list(places)
        rows = [_rows(leaf, is_dense) for leaf, is_dense in zip(leaves, dense, strict=True)]
        self._are_dense = all(dense)
        self._params = [leaf.param.detach() for leaf in leaves]
        self._dense = list(dense)
        self._columns = [list(column) for column in zip(*rows, strict=True)]
        self._whole = [_as_one(column) if self._are_dense else None for column in self._columns]
        param, *states = [one.reshape(-1) for one in rows[0]]
        first = with_tensors(leaves[0], [param, param, *states])
        name = and_more(first.name, len(leaves) - 1)
        self.like = first._replace(name=name, entries={})
        """Such as is stepped, with the numbers of the next step."""
        is_one = len(leaves) == 1 and self._are_dense
        self._one = _Gathered(self.like._replace(entries={}), [], []) if is_one else None

    def step(
        self,
        bind: BindChunk,
        stages: Sequence[Stage],
        gradients: Sequence[Tensor],
        totals: Sequence[Tensor],
        *,
        fresh: bool = False,
    ) -> None:
        """Step it, by the numbers of ``like``.

        Args:
            bind: gives what steps a chunk.
            stages: of the chain.
            gradients: of all leaves that places count.
            totals: the sum of each measured stage.
            fresh: whether what is brought together has memory of its own: what captures a step
                goes on using it.
        """
        own = [gradients[place] for place in self.places]
        found = self._one
        if found is None:
            gather = partial(self._gather, own[0].dtype, fresh=fresh)
            found = gather() if fresh else views_of_scratch(self, gather)
            foreach_copy_(found.gradients, own)
        for column, piece, parts in found.moved:
            if self._are_dense:
                torch.cat(column, out=piece)
            else:
                foreach_copy_(parts, column)
        param, grad, states, *_ = found.chunk
        grad = grad if self._one is None else _as_it_lies(own[0])
        entries = found.chunk.entries
        leaf = self.like._replace(param=param, grad=grad, states=states, entries=entries)
        bind(stages, leaf, totals)()
        for column, _, parts in found.moved:
            foreach_copy_(column, parts)

    def _gather(self, dtype: torch.dtype, *, fresh: bool) -> _Gathered:
        """Memory for what lies apart, and for gradients of this dtype."""
        tensors: list[Tensor] = []
        moved = []
        for k, column in enumerate(self._columns):
            one = self._whole[k]
            if one is None:
                one, parts = _memory(k, column, column[0].dtype, fresh=fresh)
                moved.append((column, one, parts))
            tensors.append(one)
        grad, parts = _memory(-1, self._params, dtype, fresh=fresh)
        laid = [
            part.as_strided(one.shape, one.stride()) if is_dense else part
            for part, one, is_dense in zip(parts, self._params, self._dense, strict=True)
        ]
        param, *states = tensors
        chunk = with_tensors(self.like, [param, grad, *states])
        return _Gathered(chunk._replace(entries={}), laid, moved)

    def mark_changed(self) -> None:
        """Tell autograd of what was written where it lies: not every kernel does."""
        columns = zip(self._columns, self._whole, strict=True)
        written = [one for column, whole in columns if whole is not None for one in column]
        torch.autograd.graph.increment_version([one for one in written if not one.is_inference()])


def packs_of(
    stages: Sequence[Stage], leaves: Sequence[Leaf], others: list[Leaf], *, exact: bool = False
) -> list[Pack]:
    """The packs of some leaves, whose places count from the first of them.

    Args:
        stages: of the chain, all pointwise.
        leaves: with gradients.
        others: takes the leaves that cannot be in a pack.
        exact: pack nothing where that shows: torch's kernels for 16-bit floats round the last
            elements of a tensor, past its last whole vector, in another way.
    """
    packs: list[Pack] = []
    small: dict[Any, list[tuple[int, Leaf]]] = {}
    aliased = aliased_places(leaves)
    for place, leaf in enumerate(leaves):
        if leaf.param.numel() == 0:
            others += [leaf] * counts_without_elements(leaf)
            continue
        alone = exact and leaf.param.dtype.itemsize <= 2
        if exact and leaf.param.is_cpu and overlaps_itself(leaf.grad):
            others.append(leaf)  # torch computes with an expanded tensor as with a number
            continue
        flat = place not in aliased and why_not_flat(stages, leaf) is None
        if flat and (alone or leaf.param.numel() >= LARGE) and as_chunk(leaf) is not None:
            packs.append(Pack([place], [leaf], [True]))
        elif not flat or alone or leaf.param.numel() > PACK:
            others.append(leaf)
        else:
            small.setdefault(pack_key(leaf), []).append((place, leaf))
    for alike in small.values():
        for run in _runs(alike, block_size_of(stages)):
            places, own = zip(*run, strict=True)
            packs.append(Pack(places, own, [as_chunk(leaf) is not None for leaf in own]))
    return packs


def dense_packs(stages: Sequence[Stage], leaves: Sequence[Leaf], *, exact: bool) -> list[Pack]:
    """Return the packs of leaves that are dense, each in tensors of its own.

    In the places of their gradients, which are laid out as they are, stands anything.
    """
    large = [
        (place, leaf)
        for place, leaf in enumerate(leaves)
        if leaf.param.numel() >= LARGE or (exact and leaf.param.dtype.itemsize <= 2)
    ]
    known = {place for place, _ in large}
    small = [(place, leaf) for place, leaf in enumerate(leaves) if place not in known]
    runs = [[one] for one in large] + list(_runs(small, block_size_of(stages)))
    return [
        Pack([place for place, _ in run], [leaf for _, leaf in run], [True] * len(run))
        for run in runs
    ]


def _runs(leaves: Sequence[tuple[int, Leaf]], block_size: int) -> Iterator[list[tuple[int, Leaf]]]:
    """Leaves in runs of at most PACK elements; only the last may end within a block."""
    run: list[tuple[int, Leaf]] = []
    count = 0
    for one in leaves:
        size = one[1].param.numel()
        if run and (count % block_size or count + size > PACK):
            yield run
            run, count = [], 0
        run.append(one)
        count += size
    if run:
        yield run


def _rows(leaf: Leaf, is_dense: bool) -> list[Tensor]:
    """Return the tensors that a leaf's step writes: flat if the leaf is dense, or as they are."""
    param, _, *states = tensors_of(leaf)
    if not is_dense:
        return [one.detach() for one in (param, *states)]
    views = [flat_view(one, param if one.shape == param.shape else one) for one in (param, *states)]
    found = [one for one in views if one is not None]
    assert len(found) == len(views), "it lies densely"
    return found


def _as_it_lies(gradient: Tensor) -> Tensor:
    """A gradient without gaps, in one dimension."""
    if gradient.is_contiguous():
        return gradient.detach().view(-1)
    return gradient.detach().as_strided((gradient.numel(),), (1,))


def _memory(
    place: int, like: Sequence[Tensor], dtype: torch.dtype, *, fresh: bool
) -> tuple[Tensor, list[Tensor]]:
    """Memory that is kept for what is brought together at this place, or of its own.

    Returns:
        All of it, and the parts that are for each of these tensors, of their shapes.
    """
    device, sizes = like[0].device, list(map(Tensor.numel, like))
    if fresh:
        piece = torch.empty(sum(sizes), dtype=dtype, device=device)
    else:
        piece = scratch(("pack", place), sum(sizes), dtype, device)
    parts = piece.split_with_sizes(sizes)
    return piece, [part.view(one.shape) for one, part in zip(like, parts, strict=True)]


def _as_one(column: Sequence[Tensor]) -> Tensor | None:
    """Tensors that lie side by side, as one of one dimension; None where they lie apart."""
    if len(column) == 1:
        return column[0]
    for one, other in pairwise(column):
        if one.data_ptr() + one.numel() * one.element_size() != other.data_ptr():
            return None
    first, count = column[0], sum(map(Tensor.numel, column))
    buffer = buffer_of(first)
    if buffer is not None and all(buffer_of(one) is buffer for one in column):
        start = (first.data_ptr() - buffer.data_ptr()) // first.element_size()
        return as_elements(buffer, first)[start : start + count]
    if len({one.untyped_storage().data_ptr() for one in column}) > 1:
        return None
    return first.as_strided((count,), (1,), first.storage_offset())
