"""Binder of leaves that are stepped in passes: compiled loops, and transforms of lists of leaves.

A loop writes its gradients to scratch, where the next pass reads them. Leaves are stepped in
batches, so that this scratch stays in the cache.
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
from functional_optim.kernels.passes import (
    BindTable,
    BoundLoops,
    HandOnHyper,
    Pass,
    PassLoops,
    can_pass,
    passes_of,
)
from functional_optim.kernels.scratch import scratch, views_of_scratch

BATCH = 1 << 18
"""Largest number of elements of a batch of more than one leaf."""

ALIGNMENT = 1 << 4
"""Alignment of the gradient of each leaf in scratch, in elements."""

CPU = torch.device("cpu")

_Scratch = tuple[list[Tensor], list[list[list[Tensor]]]]
"""Pieces of scratch, and for each piece and batch the gradient views of all leaves."""


class _Batch(NamedTuple):
    """Leaves that are stepped together in all passes."""

    places: range
    elements: int
    lengths: bytes
    shapes: list[torch.Size]
    offsets: list[int]
    """The position in scratch of the gradient of each leaf, in elements."""
    room: int
    """Number of elements of scratch."""


class LeafPasses:
    """Passes over leaves with the same coefficients and dtypes.

    Args:
        bind_table: of the kernel that compiles loops.
        passes: of :func:`passes_of`.
        leaves: leaves with plain contiguous CPU tensors that share no memory. No reference to them
            is kept.
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
        """The start of each stage's state among the tensors of a leaf, and the end."""
        measures = [0, *accumulate(map(is_measured, stages))]
        self._totals = [slice(measures[one.start], measures[one.stop]) for one in passes]
        """For each pass, the totals of its stages."""
        self._getters = [
            [_getter([places[k][j] for k in batch.places]) for j in range(self._width)]
            for batch in self._batches
        ]
        """For each batch, the getter of each column of tensors from the list of a step."""
        self._bound: BoundLoops | None = None
        self._tables: tuple[Any, ...] | None = None
        self._retry = 0.0
        """The step at which the next attempt to bind loops is made."""

    def bind(
        self, tensors: Sequence[Tensor], like: Leaf, totals: Sequence[Tensor], pointers: bytes
    ) -> list[Part] | None:
        """Bind a step, as ``BindParts``; return None if a pass has no loop."""
        if not self._loops.can_bind(like.coefficients):
            return None
        loops = self._bound
        if loops is None and not isinstance(like.step, Tensor) and like.step < self._retry:
            return None
        found = None if loops is None else self._calls(loops, tensors, like, totals, pointers)
        if found is None:
            loops = self._bound = self._loops.bind(like, self._elements)
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
        """Bind a step by loops; return None if static coefficients changed."""
        pieces, views = views_of_scratch(loops, partial(self._scratch, loops.dtypes))
        bases = [(one.data_ptr(), one.itemsize) for one in pieces]
        tables = self._get_tables(pointers, bases)
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
        return [(batch.places, partial(_run_all, own, pieces)) for batch, own in batches]

    def _add_whole(
        self,
        one: Pass,
        tensors: Sequence[Tensor],
        views: Sequence[list[Tensor]],
        like: Leaf,
        calls: Sequence[list[Call]],
    ) -> None:
        """Add the calls of a whole-leaf stage, one for each batch."""
        assert one.whole is not None
        run: Any = one.whole.transform_each_
        state, coefficients = like.states[one.stop], like.coefficients[one.stop]
        first, last = self._ends[one.stop], self._ends[one.stop + 1]
        for getters, grads, own in zip(self._getters, views, calls, strict=True):
            columns = [list(get(tensors)) for get in getters[first:last]]
            lists: Any = map_state(partial(_next, iter(columns)), state)
            own.append(partial(run, grads, list(getters[0](tensors)), lists, coefficients))

    def _scratch(self, dtypes: Sequence[torch.dtype]) -> _Scratch:
        pieces = [scratch(("pass", k), self._room, one, CPU) for k, one in enumerate(dtypes)]
        return pieces, [[_gradient_views(piece, one) for one in self._batches] for piece in pieces]

    def _get_tables(self, pointers: bytes, bases: list[tuple[int, int]]) -> list[list[Table]]:
        """Return the tables of each pass, one for each batch; cached for the same addresses."""
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
        found = [self._build_tables(one, columns, handed) for one in self._passes]
        self._tables = pointers, bases, found
        return found

    def _build_tables(
        self, one: Pass, columns: Sequence[memoryview], handed: Sequence[memoryview]
    ) -> list[Table]:
        """Return the tables of a pass, one for each batch.

        ``columns`` are the addresses of the parameters, the gradients and each tensor of the state,
        and ``handed`` those of the gradients in each scratch.
        """
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


def bind_in_passes(
    bind_table: BindTable,
    stages: Sequence[Stage],
    leaves: Sequence[Leaf],
    places: Sequence[Sequence[int]],
    otherwise: BindParts,
) -> BindParts:
    """Return a function that binds steps in passes, or by ``otherwise`` if a pass has no loop."""
    passes = passes_of(stages)
    if passes is None or not can_pass(stages, passes, leaves):
        return otherwise
    first = LeafPasses(bind_table, stages, passes, leaves, places).bind

    def bind(
        tensors: Sequence[Tensor], like: Leaf, totals: Sequence[Tensor], pointers: bytes
    ) -> list[Part] | None:
        found = first(tensors, like, totals, pointers)
        return otherwise(tensors, like, totals, pointers) if found is None else found

    return bind


def _batches(leaves: Sequence[Leaf]) -> Iterator[_Batch]:
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


def _gradient_views(piece: Tensor, batch: _Batch) -> list[Tensor]:
    return [
        piece[start : start + shape.numel()].view(shape)
        for shape, start in zip(batch.shapes, batch.offsets, strict=True)
    ]


def _getter(positions: Sequence[int]) -> Callable[[Any], Sequence[Tensor]]:
    """Return a function from a list to the tensors at some positions of the list."""
    if len(positions) == 1:
        return itemgetter(slice(positions[0], positions[0] + 1))
    return itemgetter(*positions)


def _next(columns: Iterator[Any], tensor: Tensor) -> Any:
    return next(columns)


def _run_all(calls: Sequence[Call], scratches: Sequence[Tensor]) -> None:
    # The calls have only the addresses of scratch; the argument keeps it alive.
    for call in calls:
        call()
