"""StepPlan: what a step of certain leaves does, found out once."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.core.checks import check_grad
from functional_optim.core.stage import Stage
from functional_optim.core.unbroken import unbroken
from functional_optim.kernels import Executor, Leaf
from functional_optim.plan import engine
from functional_optim.plan.chunks import Chunk, ShapeGuard, chunks_of, state_of
from functional_optim.plan.engine import Item, Made, coefficients_at
from functional_optim.plan.guard import MemoryGuard, mark_changed
from functional_optim.plan.packs import packs_of
from functional_optim.plan.totals import Totals

_Call = Callable[[], object]

Numbers = Sequence[Made]
"""What the leaves of each group are stepped by, where their step count does not decide it."""


class Memory(NamedTuple):
    """Tensors that are looked at in place of the leaves, which are parts of them."""

    tensors: list[Tensor]
    written: int
    """How many of them, from the first on, a step writes to."""

    @classmethod
    def of(cls, items: Sequence[Item]) -> "Memory":
        """The tensors of the leaves themselves."""
        tensors = [one for item in items for one in state_of(item)]
        return cls(tensors, len(tensors))


class Steps(NamedTuple):
    """A step of a plan that nothing refuses any more."""

    first: _Call | None
    """Steps leaves that no kernel takes where they lie."""
    calls: Sequence[tuple[Chunk, _Call]]
    """Steps each of the others."""
    written: Sequence[Tensor]
    """What kernels write to, unseen by autograd."""
    counted: bool
    """Whether the steps of the leaves are counted."""

    def make(self) -> None:
        """Make it."""
        if self.written:
            mark_changed(self.written)
        if self.first is not None:
            self.first()
        for chunk, call in self.calls:
            call()
            if self.counted:
                chunk.counts.advance()


class StepPlan:
    """A step of certain leaves: as few calls of a kernel as can be, and other leaves one by one.

    It is made of leaves that were checked. At each step it looks at what may have changed since:
    where tensors lie and what they are like, the step counts, the gradients, and the choices among
    the hyper-parameters. Numbers may be new at each step.

    Args:
        stages: of the chain.
        executor: that steps them.
        items: the leaves. Their gradients are not kept.
        groups: for each, the number of the group whose hyper-parameters it has.
        chunks: of these leaves; found out if they are not given.
        memory: what the leaves are parts of, where their state is made once and for all; without
            it, a leaf before its first step is none of a plan, since its state may be made anew.
        counted: whether this counts the steps of the leaves. Where a leaf is a part of something
            that has made a step once all of its parts have, whoever knows that counts.
        may_begin: whether leaves may be before their first step; so they may with a memory.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        executor: Executor,
        items: Sequence[Item],
        groups: Sequence[int],
        *,
        chunks: Sequence[Chunk] | None = None,
        memory: Memory | None = None,
        counted: bool = True,
        may_begin: bool = False,
    ) -> None:
        self._stages, self._executor, self._counted = stages, executor, counted
        if chunks is None:
            with torch.no_grad():
                chunks = chunks_of(stages, executor, items, groups)
        self._chunks = chunks
        # In the gradient's place stands what is there anyway.
        self._items = [item._replace(grad=item.param) for item in items]
        self._totals = Totals(stages, self._items, chunks)
        self._groups = list(groups)
        known = {place for chunk in self._chunks for place in chunk.members}
        self._others = [place for place in range(len(items)) if place not in known]
        self._apart = ShapeGuard([one for k in self._others for one in state_of(items[k])])
        self._may_begin = may_begin or memory is not None
        memory = memory or Memory.of([items[k] for k in sorted(known)])
        self._tensors, self._written = memory.tensors, memory.tensors[: memory.written]
        self._guard = MemoryGuard(self._tensors)

    def make(
        self,
        gradients: list[Tensor],
        hypers: Sequence[tuple[Any, ...]],
        measured: Sequence[Tensor] = (),
    ) -> bool:
        """The step, if the plan holds: :meth:`holds` and :meth:`run`."""
        return self.holds() and self.run(gradients, hypers, measured)

    def run(
        self,
        gradients: list[Tensor],
        hypers: Sequence[tuple[Any, ...]],
        measured: Sequence[Tensor] = (),
        *,
        one_by_one: bool = True,
    ) -> bool:
        """The step of a plan that was just seen to hold.

        Args:
            gradients: one for each leaf.
            hypers: of each group, checked.
            measured: the totals of measured stages, where other processes have a part in them.
            one_by_one: whether leaves that no chunk takes are stepped one by one.

        Returns:
            Whether it was made; otherwise nothing was changed.

        Raises:
            TypeError, ValueError, RuntimeError: a gradient that does not fit; nothing was changed.
        """
        steps = self.prepared(gradients, hypers, measured, one_by_one=one_by_one)
        if steps is None:
            return False
        steps.make()
        return True

    def prepared(
        self,
        gradients: list[Tensor],
        hypers: Sequence[tuple[Any, ...]],
        measured: Sequence[Tensor] = (),
        *,
        one_by_one: bool = True,
        numbers: Numbers | None = None,
    ) -> "Steps | None":
        """What :meth:`run` does, of which nothing is refused any more; None where it does nothing.

        Args:
            gradients, hypers, measured, one_by_one: as for :meth:`run`, and so are the errors.
            numbers: what the leaves of each group are stepped by, in the place of ``hypers`` and of
                their step counts.
        """
        taken = []
        for chunk in self._chunks:  # as a rule one, and a comprehension is a call
            taken.append(self._takes(chunk, gradients, hypers, numbers))  # noqa: PERF401
        totals, needed = measured, self._totals.count
        if len(measured) < needed and not self._others and all(taken) and taken:
            totals = self._totals.of(gradients, measured)
        calls, others = self._calls(taken, gradients, totals, packs=one_by_one)
        if others and needed:  # their sums are taken together
            calls, others = [], list(range(len(self._items)))
        first = None
        if others:
            if not one_by_one:
                return None
            first = self._of_others(others, gradients, hypers, measured, numbers)
        return Steps(first, calls, self._written if calls else (), self._counted)

    def _of_others(
        self,
        places: Sequence[int],
        gradients: list[Tensor],
        hypers: Sequence[tuple[Any, ...]],
        measured: Sequence[Tensor],
        numbers: Numbers | None,
    ) -> _Call:
        """What steps leaves that no kernel takes where they lie."""
        if numbers is not None:
            hypers = [made.hypers for made in numbers]
        items = [
            self._items[k]._replace(grad=gradients[k], hypers=hypers[self._groups[k]])
            for k in places
        ]
        for item in items:
            check_grad(item.param, item.grad, item.name)
        make = None
        if numbers is not None:
            groups = {id(self._items[k].state.step): self._groups[k] for k in places}
            make = partial(_made, numbers, groups)
        stages, executor = self._stages, self._executor
        return engine.prepared(stages, executor, items, measured, make, counts=self._counted)

    def _takes(
        self,
        chunk: Chunk,
        gradients: list[Tensor],
        hypers: Sequence[tuple[Any, ...]],
        numbers: Numbers | None,
    ) -> bool:
        """Tell a chunk what is new; whether its gradients are such as a kernel takes."""
        if numbers is None:
            now = hypers[chunk.group]
            if now is not chunk.hypers:
                chunk.use(now)
            made = coefficients_at(self._stages, now, chunk.made + 1.0, plain=chunk.plain)
            chunk.resolved, chunk.coefficients = made
        else:
            chunk.resolved, chunk.coefficients, step, _ = numbers[chunk.group]
            assert not isinstance(step, Tensor), "it was read from a tensor with memory"
            chunk.made, chunk.required = int(step) - 1, None  # choices may be others at each step
        if chunk.gradients is not None:
            own = gradients if chunk.is_all else chunk.own(gradients)
            addresses = chunk.gradients.of(own)
            if addresses is None:
                return False
            assert chunk.table is not None
            chunk.now = chunk.table.by(addresses)
        return True

    def _calls(
        self,
        taken: Sequence[bool],
        gradients: list[Tensor],
        totals: Sequence[Tensor],
        *,
        packs: bool,
    ) -> tuple[list[tuple[Chunk, _Call]], list[int]]:
        """The calls of kernels, and the places of leaves that none of them steps.

        Args:
            taken: whether a kernel takes the gradients of each chunk.
            gradients: of all leaves.
            totals: the sum of each measured stage.
            packs: whether a chunk that no kernel takes as it lies is stepped by packs.
        """
        calls: list[tuple[Chunk, _Call]] = []
        others = self._others
        if self._totals.count and (others or not all(taken)):
            return [], list(range(len(self._items)))
        for chunk, is_taken in zip(self._chunks, taken, strict=True):
            call = None
            if is_taken:
                if chunk.feed is not None and chunk.now is not None:
                    call = chunk.feed(chunk.coefficients, chunk.now, totals)
                if call is None and chunk.other is not None and chunk.now is not None:
                    chunk.feed, chunk.other = chunk.other, chunk.feed
                    call = chunk.feed(chunk.coefficients, chunk.now, totals)
                if call is None:
                    call = self._bound(chunk, totals)
                if call is None and chunk.columns:
                    call = self._by_lists(chunk, gradients, totals)
                if call is None and packs:
                    call = self._by_packs(chunk, gradients, totals)
            if call is None:
                others = sorted([*others, *chunk.members])
            else:
                calls.append((chunk, call))
        return calls, others

    def _bound(self, chunk: Chunk, totals: Sequence[Tensor]) -> _Call | None:
        """What steps a chunk that no kernel is bound to, for these choices; None for nothing."""
        executor, hypers, coefficients = chunk.executor, chunk.resolved, chunk.coefficients
        step = chunk.made + 1.0
        if chunk.now is not None and executor.joins:
            like = chunk.like._replace(hypers=hypers, coefficients=coefficients, step=step)
            chunk.other = chunk.feed
            chunk.feed = executor.bind_table(self._stages, like, chunk.now.elements)
            call = None if chunk.feed is None else chunk.feed(coefficients, chunk.now, totals)
            if call is not None:
                return call
        if not chunk.runs:
            return None
        runs = [
            run._replace(hypers=hypers, coefficients=coefficients, step=step) for run in chunk.runs
        ]
        self._require(chunk, runs)
        calls = [executor.bind_chunk(self._stages, run, totals) for run in runs]
        return partial(_in_turn, calls, lambda k: chunk.parts[k]().advance())

    def _require(self, chunk: Chunk, runs: Sequence[Leaf]) -> None:
        """Make sure that the executor takes runs: once for the same numbers.

        Raises:
            KernelError: it does not.
        """
        if chunk.plain and chunk.required is chunk.hypers:
            return
        chunk.executor.require(self._stages, runs)
        chunk.required = chunk.hypers

    def _by_lists(
        self, chunk: Chunk, gradients: list[Tensor], totals: Sequence[Tensor]
    ) -> _Call | None:
        """What steps a chunk by lists of its tensors, in one call; None for nothing."""
        like = chunk.like._replace(
            hypers=chunk.resolved, coefficients=chunk.coefficients, step=chunk.made + 1.0
        )
        self._require(chunk, [like])
        params, *states = chunk.columns
        columns = [params, chunk.own(gradients), *states]
        return chunk.executor.bind_lists(self._stages, like, columns, totals)

    def _by_packs(self, chunk: Chunk, gradients: list[Tensor], totals: Sequence[Tensor]) -> _Call:
        """What steps a chunk that no kernel takes as it lies.

        Raises:
            KernelError: the executor asked for does not step it.
            NotPointwiseError: a stage only says that it is pointwise.
        """
        stages, executor = self._stages, chunk.executor
        numbers = (chunk.made + 1.0, chunk.resolved, chunk.coefficients)
        if chunk.packs is None:
            items = [self._items[place] for place in chunk.members]
            packs = packs_of(executor, stages, items)
            for pack in packs:
                like = pack.take(*numbers)
                executor.validate(stages, like, totals)
                executor.bind_chunk(stages, like, totals)  # refused, if so, before any is stepped
            chunk.packs = packs
        packs, own = chunk.packs, chunk.own(gradients)
        self._require(chunk, [pack.take(*numbers) for pack in packs])

        def count(k: int) -> None:
            for place in packs[k].places if self._counted else ():
                self._items[chunk.members[place]].state.step.add_(1)

        steps = [partial(pack.step, executor, stages, own, totals) for pack in packs]
        return partial(unbroken, _in_turn, steps, count)

    def holds(self) -> bool:
        """Whether leaves are what they were."""
        if not self.has_common_counts():
            return False
        return not self._tensors or self._guard.hold(self._tensors)

    def holds_but_for_counts(self) -> bool:
        """The same for who has read what they counted."""
        there = self._guard.hold(self._tensors) if self._tensors else True
        return there and (not self._others or self._others_hold())

    @property
    def has_chunks(self) -> bool:
        """Whether a kernel steps any of the leaves where they lie."""
        return bool(self._chunks)

    def has_common_counts(self) -> bool:
        """Whether the leaves of each chunk have made as many steps; the rest of :meth:`holds`.

        For who has seen that all tensors are where they were.
        """
        for chunk in self._chunks:
            made = chunk.counts.common()
            if made is None or not (made or self._may_begin):
                return False
            chunk.made = made
        return not self._others or self._others_hold()

    def _others_hold(self) -> bool:
        started = self._may_begin or all(int(self._items[k].state.step) for k in self._others)
        return started and self._apart.hold()


def _made(numbers: Numbers, groups: Mapping[int, int], item: Item) -> Made:
    """The numbers of an item, by the group of its step count."""
    return numbers[groups[id(item.state.step)]]


def _in_turn(steps: Sequence[_Call], count: Callable[[int], object]) -> None:
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
