"""Leaves stepped in passes: loops over all of them, and transforms that take lists of them.

A loop hands its gradients to the next pass in scratch. Leaves are stepped in batches, so that this
scratch stays in the cache.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.core.leaf import Leaf, is_measured
from functional_optim.core.stage import Stage
from functional_optim.core.state import map_state, state_tensors
from functional_optim.kernels.chunks import Table
from functional_optim.kernels.kernel import BindParts, Call, Part
from functional_optim.kernels.pass_loops import BindTable, BoundLoops, PassLoops
from functional_optim.kernels.passes import HandOnHyper, Pass, can_pass, passes_of
from functional_optim.kernels.scratch import scratch, views_of_scratch

BATCH = 1 << 18
"""Most elements of the leaves of a batch, unless it is a single leaf."""

ALIGNMENT = 1 << 4
"""The gradient of each leaf begins in scratch at a multiple of so many elements."""

CPU = torch.device("cpu")

_Scratch = tuple[list[Tensor], list[list[list[Tensor]]]]
"""Pieces of scratch, and for each piece and batch the gradient of each leaf."""


class _Batch(NamedTuple):
    """Leaves that go through all passes together."""

    places: range
    elements: int
    lengths: bytes
    shapes: list[torch.Size]
    offsets: list[int]
    """Of the gradient of each leaf in scratch."""
    room: int
    """Elements of scratch for all of them."""


class LeafPasses:
    """Passes over leaves that have coefficients and dtypes in common.

    Args:
        bind_table: of the kernel that makes the loops.
        stages: of the chain.
        passes: of :func:`passes_of`.
        leaves: plain contiguous tensors of the CPU, which share no memory. They are not kept.
        places: for each leaf, the positions of its tensors in the list of a step.
    """

    def __init__(
        self,
        bind_table: BindTable,
        stages: Sequence[Stage],
        passes: Sequence[Pass],
        leaves: Sequence[Leaf],
        places: Sequence[Sequence[int]],
    ) -> None:
        self._passes, self._loops = passes, PassLoops(bind_table, stages, passes)
        self._batches = list(_batches(leaves))
        self._elements = sum(one.elements for one in self._batches)
        self._room = max(one.room for one in self._batches)
        self._width = len(places[0])
        ends = [2]
        for state in leaves[0].states:
            ends.append(ends[-1] + len(state_tensors((state,))))
        self._ends = ends
        """The position of each stage's state among the tensors of a leaf."""
        measures = [0, *accumulate(map(is_measured, stages))]
        self._totals = [slice(measures[one.start], measures[one.stop]) for one in passes]
        """For each pass, which totals its stages take."""
        self._takers = [
            [_taker([places[k][j] for k in batch.places]) for j in range(self._width)]
            for batch in self._batches
        ]
        """For each batch, what takes a column of tensors out of the list of a step."""
        self._kept: BoundLoops | None = None
        self._tables: tuple[Any, ...] | None = None
        self._retry = 0.0
        """The step from which loops are asked for again."""

    def parts(
        self, tensors: Sequence[Tensor], like: Leaf, totals: Sequence[Tensor], pointers: bytes
    ) -> list[Part] | None:
        """Bind a step: a call for each batch; None where a pass has no loop.

        Args:
            tensors, like, totals, pointers: as of ``BindParts``.
        """
        if not self._loops.takes(like.coefficients):
            return None
        loops = self._kept
        if loops is None and not isinstance(like.step, Tensor) and like.step < self._retry:
            return None
        found = None if loops is None else self._calls(loops, tensors, like, totals, pointers)
        if found is None:
            loops = self._kept = self._loops.bind(like, self._elements)
            if loops is not None:
                found = self._calls(loops, tensors, like, totals, pointers)
            elif not isinstance(like.step, Tensor):
                self._retry = 1.5 * like.step
        return found

    def _calls(
        self,
        loops: BoundLoops,
        tensors: Sequence[Tensor],
        like: Leaf,
        totals: Sequence[Tensor],
        pointers: bytes,
    ) -> list[Part] | None:
        """Bind a step by loops; None where other choices stand among the coefficients."""
        pieces, views = views_of_scratch(loops, partial(self._scratch, loops.dtypes))
        bases = [(one.data_ptr(), one.itemsize) for one in pieces]
        tables = self._tables_at(pointers, bases)
        calls: list[list[Call]] = [[] for _ in self._batches]
        for number, one in enumerate(self._passes):
            loop = loops.bound[number]
            if loop is not None:
                coefficients = like.coefficients[one.start : one.stop]
                if one.whole is not None:
                    coefficients = (*coefficients, HandOnHyper())
                own = totals[self._totals[number]]
                for table, batch in zip(tables[number], calls, strict=True):
                    call = loop(coefficients, table, own)
                    if call is None:
                        return None
                    batch.append(call)
            if one.whole is not None:
                self._add_whole(one, tensors, views[one.writes], like, calls)
        batches = zip(self._batches, calls, strict=True)
        return [(batch.places, partial(_in_turn, own, pieces)) for batch, own in batches]

    def _add_whole(
        self,
        one: Pass,
        tensors: Sequence[Tensor],
        views: Sequence[list[Tensor]],
        like: Leaf,
        calls: Sequence[list[Call]],
    ) -> None:
        """Add the calls of a stage that takes whole leaves, one for each batch."""
        assert one.whole is not None
        run: Any = one.whole.transform_each_
        state, coefficients = like.states[one.stop], like.coefficients[one.stop]
        first, last = self._ends[one.stop], self._ends[one.stop + 1]
        for takers, grads, own in zip(self._takers, views, calls, strict=True):
            columns = [list(take(tensors)) for take in takers[first:last]]
            lists: Any = map_state(partial(_next, iter(columns)), state)
            own.append(partial(run, grads, list(takers[0](tensors)), lists, coefficients))

    def _scratch(self, dtypes: Sequence[torch.dtype]) -> _Scratch:
        """Return scratch of these dtypes, and the gradient of each leaf in it."""
        pieces = [scratch(("pass", k), self._room, one, CPU) for k, one in enumerate(dtypes)]
        return pieces, [[_gradients(piece, one) for one in self._batches] for piece in pieces]

    def _tables_at(self, pointers: bytes, bases: list[tuple[int, int]]) -> list[list[Table]]:
        """Return the tables of each pass, one for each batch; those of the last step if they fit.

        Args:
            pointers: to all tensors, leaf by leaf.
            bases: for each scratch, its address and the bytes of an element.
        """
        kept = self._tables
        if kept is not None and kept[0] == pointers and kept[1] == bases:
            found: list[list[Table]] = kept[2]
            return found
        given = memoryview(pointers).cast("q")
        columns = [given[j :: self._width] for j in range(self._width)]
        handed = [
            memoryview(array("q", [base + size * o for b in self._batches for o in b.offsets]))
            for base, size in bases
        ]
        found = [self._tables_of(one, columns, handed) for one in self._passes]
        self._tables = pointers, bases, found
        return found

    def _tables_of(
        self, one: Pass, columns: Sequence[memoryview], handed: Sequence[memoryview]
    ) -> list[Table]:
        """Return the tables of a pass."""
        own = [columns[0], columns[1] if one.reads < 0 else handed[one.reads]]
        own += columns[self._ends[one.start] : self._ends[one.stop]]
        if one.whole is not None:
            own.append(handed[one.writes])
        every = array("q", bytes(len(own) * columns[0].nbytes))
        view = memoryview(every)
        for j, column in enumerate(own):
            view[j :: len(own)] = column
        row = every.itemsize * len(own)
        data = every.tobytes()
        return [
            Table(
                batch.elements,
                len(batch.places),
                batch.lengths,
                data[row * batch.places.start : row * batch.places.stop],
            )
            for batch in self._batches
        ]


def in_passes(
    bind_table: BindTable,
    stages: Sequence[Stage],
    leaves: Sequence[Leaf],
    places: Sequence[Sequence[int]],
    otherwise: BindParts,
) -> BindParts:
    """Return what binds steps in passes where there are loops, and else in another way.

    Args:
        bind_table, stages, leaves, places: as for :class:`LeafPasses`.
        otherwise: the other way.
    """
    passes = passes_of(stages)
    if passes is None or not can_pass(stages, passes, leaves):
        return otherwise
    first = LeafPasses(bind_table, stages, passes, leaves, places).parts

    def bind(
        tensors: Sequence[Tensor], like: Leaf, totals: Sequence[Tensor], pointers: bytes
    ) -> list[Part] | None:
        found = first(tensors, like, totals, pointers)
        return otherwise(tensors, like, totals, pointers) if found is None else found

    return bind


def _batches(leaves: Sequence[Leaf]) -> Iterator[_Batch]:
    """Divide leaves into batches."""
    lengths = [leaf.param.numel() for leaf in leaves]
    start = elements = 0
    for stop in range(1, len(leaves) + 1):
        elements += lengths[stop - 1]
        if stop < len(leaves) and elements + lengths[stop] <= BATCH:
            continue
        own, offsets, room = lengths[start:stop], [], 0
        for length in own:
            offsets.append(room)
            room += -(-length // ALIGNMENT) * ALIGNMENT
        shapes = [leaf.param.shape for leaf in leaves[start:stop]]
        counts = array("l", own).tobytes()
        yield _Batch(range(start, stop), elements, counts, shapes, offsets, room)
        start, elements = stop, 0


def _gradients(piece: Tensor, batch: _Batch) -> list[Tensor]:
    """Return the gradient of each leaf of a batch in scratch."""
    return [
        piece[start : start + shape.numel()].view(shape)
        for shape, start in zip(batch.shapes, batch.offsets, strict=True)
    ]


def _taker(positions: Sequence[int]) -> Callable[[Any], Sequence[Tensor]]:
    """Return what takes the tensors at some positions out of a list."""
    if len(positions) == 1:
        return itemgetter(slice(positions[0], positions[0] + 1))
    return itemgetter(*positions)


def _next(columns: Iterator[Any], tensor: Tensor) -> Any:
    return next(columns)


def _in_turn(calls: Sequence[Call], scratches: Sequence[Tensor]) -> None:
    """Make calls. They know scratch by its address alone, so it must live."""
    for call in calls:
        call()
