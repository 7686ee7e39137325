"""The ways in which the leaves of a chunk are stepped; the first that takes them makes the step.

Each is told of a chunk's numbers by the chunk, and finds out once what it can.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from functional_optim.core.interrupts import defer_interrupts
from functional_optim.kernels import Leaf
from functional_optim.kernels.chunks import Table
from functional_optim.kernels.kernel import BindParts, BindScalars, Call
from functional_optim.kernels.packs import Pack, dense_packs
from functional_optim.plan.chunk import Chunk
from functional_optim.plan.counts import Counts
from functional_optim.plan.item import Item


class ByTable:
    """Way by one call of a kernel that is given pointers to every tensor of every leaf.

    Args:
        table: where they lie.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self._bound: BindScalars | None = None
        """A kernel bound to them, for the choices among the hyper-parameters that were made last.
        """
        self._other: BindScalars | None = None
        """The same for the choices before, which may come again: a batch begins, and goes on."""

    def call(self, chunk: Chunk, gradients: list[Tensor], totals: Sequence[Tensor]) -> Call | None:
        """Bind the step; None if no kernel takes pointers."""
        table = self._table if chunk.addresses is None else self._table.by(chunk.addresses)
        call = None if self._bound is None else self._bound(chunk.coefficients, table, totals)
        if call is None and self._other is not None:
            self._bound, self._other = self._other, self._bound
            call = self._bound(chunk.coefficients, table, totals)
        if call is None:
            self._other = self._bound
            like = chunk.numbered(chunk.like)
            self._bound = chunk.executor.bind_table(chunk.stages, like, table.elements)
            call = None if self._bound is None else self._bound(chunk.coefficients, table, totals)
        return call


class ByRuns:
    """A call of a kernel for each stretch of memory in which leaves lie side by side.

    Args:
        runs: the stretches, with gradients, as leaves of one dimension.
        parts: give the counts of each, where a step is broken off between them.
    """

    def __init__(self, runs: Sequence[Leaf], parts: Sequence[Callable[[], Counts]]) -> None:
        self._runs, self._parts = runs, parts

    def call(self, chunk: Chunk, gradients: list[Tensor], totals: Sequence[Tensor]) -> Call | None:
        """Bind the step.

        Raises:
            KernelError: the executor asked for does not step them.
        """
        runs = list(map(chunk.numbered, self._runs))
        chunk.require(runs)
        calls = [chunk.executor.bind_chunk(chunk.stages, run, totals) for run in runs]
        return partial(_in_turn, calls, lambda k: self._parts[k]().advance())


class ByLists:
    """Way by one call of a kernel that takes lists of tensors.

    Args:
        columns: all parameters, and all of each tensor of the state.
    """

    def __init__(self, columns: Sequence[list[Tensor]]) -> None:
        self._params, *self._states = columns

    def call(self, chunk: Chunk, gradients: list[Tensor], totals: Sequence[Tensor]) -> Call | None:
        """Bind the step; None if no kernel takes lists.

        Raises:
            KernelError: the executor asked for does not step them.
        """
        like = chunk.numbered(chunk.like)
        chunk.require([like])
        columns = [self._params, chunk.own(gradients), *self._states]
        return chunk.executor.bind_lists(chunk.stages, like, columns, totals)


class ByPacks:
    """A call for each pack of leaves: small ones are brought together, and back.

    Args:
        items: the leaves; each lies densely, in tensors of its own.
        counted: whether this counts the steps of the leaves.
    """

    def __init__(self, items: Sequence[Item], *, counted: bool) -> None:
        self._items, self._counted = items, counted
        self._packs: list[Pack] | None = None

    def call(self, chunk: Chunk, gradients: list[Tensor], totals: Sequence[Tensor]) -> Call | None:
        """Bind the step.

        Raises:
            KernelError: the executor asked for does not step them.
            NotPointwiseError: a stage only says that it is pointwise.
        """
        stages, executor = chunk.stages, chunk.executor
        if self._packs is None:
            packs = dense_packs(stages, list(map(_leaf, self._items)), exact=executor.exact)
            for pack in packs:
                pack.like = chunk.numbered(pack.like)
                executor.validate(stages, pack.like, totals)
                executor.bind_chunk(stages, pack.like, totals)  # refused before any is stepped
            self._packs = packs
        packs, own = self._packs, chunk.own(gradients)
        for pack in packs:
            pack.like = chunk.numbered(pack.like)
        chunk.require([pack.like for pack in packs])

        def count(k: int) -> None:
            for place in packs[k].places if self._counted else ():
                self._items[place].state.step.add_(1)

        bind = executor.bind_chunk
        steps = [partial(pack.step, bind, stages, own, totals) for pack in packs]
        return partial(defer_interrupts, _in_turn, steps, count)


class ByWholes:
    """A call for each stack of leaves, and each leaf alone, of a chain that needs whole tensors.

    Args:
        bind: the steps of the leaves.
        kinds: one of them for each shape.
        counts: gives the step counts of leaves, for a step that is broken off between them; None
            where this does not count.
    """

    def __init__(
        self,
        bind: BindParts,
        kinds: Sequence[Leaf],
        counts: Callable[[Sequence[int]], Counts] | None,
    ) -> None:
        self._bind, self._kinds, self._counts = bind, kinds, counts

    def call(self, chunk: Chunk, gradients: list[Tensor], totals: Sequence[Tensor]) -> Call | None:
        """Bind the step; None if a leaf has no program.

        Raises:
            RuntimeError: a rule refuses a shape or dtype.
        """
        chunk.require(list(map(chunk.numbered, self._kinds)))
        like = chunk.numbered(chunk.like)
        with torch.no_grad():
            parts = self._bind(like, chunk.own(gradients), totals)
        if parts is None:
            return None

        def count(k: int) -> None:
            if self._counts is not None:
                self._counts(parts[k][0]).advance()

        return partial(defer_interrupts, _in_turn, [step for _, step in parts], count)


def _leaf(item: Item) -> Leaf:
    return Leaf(item.param, item.grad, item.state.stages, (), item.name)


def _in_turn(steps: Sequence[Call], count: Callable[[int], object]) -> None:
    """Make steps that are counted together; where one is broken off, those before it are counted.

    Args:
        steps: of some leaves each.
        count: counts the step of this place.
    """
    done = 0
    try:
        with torch.no_grad():
            for step in steps:
                step()
                done += 1
    except BaseException:
        for place in range(done):
            count(place)
        raise
