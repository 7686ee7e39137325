"""StepPlan: what a step of certain leaves does, found out once."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.core.checks import check_grad
from functional_optim.core.stage import Stage
from functional_optim.core.state import map_state
from functional_optim.core.views import real_view
from functional_optim.kernels import Executor, Leaf
from functional_optim.kernels.kernel import Call
from functional_optim.plan import engine
from functional_optim.plan.chunk import Chunk, Numbers
from functional_optim.plan.chunks import ShapeGuard, chunks_of, state_of
from functional_optim.plan.guard import MemoryGuard, mark_changed
from functional_optim.plan.item import Item, Made
from functional_optim.plan.totals import Totals


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

    first: Call | None
    """Steps leaves that no kernel takes where they lie."""
    calls: Sequence[tuple[Chunk, Call]]
    """Steps each of the others."""
    written: Sequence[Tensor]
    """What kernels write to, unseen by autograd."""
    counted: bool
    """Whether the steps of the leaves are counted."""
    read: Sequence[Sequence[Tensor]]
    """Gradients and totals. Calls have the addresses alone, so the tensors must live until then."""

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
                chunks = chunks_of(stages, executor, items, groups, counted=counted)
        self._chunks = chunks
        # In the gradient's place stands what is there anyway.
        self._items = [item._replace(grad=item.param) for item in items]
        params = [item.param for item in items]
        self._totals = Totals(stages, [chunk.members for chunk in chunks], params)
        self._has_complex = any(one.is_complex() for one in params)
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
        """Check and bind a step that :meth:`run` would make; None if it would make none.

        Args:
            gradients, hypers, measured, one_by_one: as for :meth:`run`, and so are the errors.
            numbers: what the leaves of each group are stepped by, in the place of ``hypers`` and of
                their step counts.
        """
        taken, others = [], self._others
        for chunk in self._chunks:  # as a rule one
            if chunk.take(gradients, hypers, numbers):
                taken.append(chunk)
            else:
                others = [*others, *chunk.members]
        totals = measured
        if taken and len(measured) < self._totals.count:
            if others:
                leaves = self._leaves(range(len(self._items)), gradients, hypers, numbers)
                totals = engine.totals(self._stages, self._executor, *leaves, measured)
            else:
                totals = self._sums(gradients, measured)
        calls: list[tuple[Chunk, Call]] = []
        for chunk in taken:
            for way in chunk.ways + chunk.otherwise if one_by_one else chunk.ways:
                call = way.call(chunk, gradients, totals)
                if call is not None:
                    calls.append((chunk, call))
                    break
            else:
                others = [*others, *chunk.members]
        first = None
        if others:
            if not one_by_one:
                return None
            items, make = self._leaves(sorted(others), gradients, hypers, numbers)
            first = engine.prepared(
                self._stages, self._executor, items, totals, make, counts=self._counted
            )
        written = self._written if calls else ()
        return Steps(first, calls, written, self._counted, (gradients, totals))

    def _sums(self, gradients: list[Tensor], measured: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return all totals, where every leaf is in a chunk."""
        seen = list(map(real_view, gradients)) if self._has_complex else gradients

        def leaf(k: int, coefficients: tuple[Any, ...]) -> Leaf:
            """Return a leaf as stages see it."""
            param, states = self._items[k].param, self._items[k].state.stages
            if param.is_complex():
                param, states = real_view(param), tuple(map(_real, states))
            return Leaf(param, seen[k], states, coefficients, self._items[k].name)

        own = [chunk.coefficients for chunk in self._chunks]
        return self._totals.of(self._chunks[0].executor, own, seen, measured, leaf)

    def _leaves(
        self,
        places: Sequence[int],
        gradients: list[Tensor],
        hypers: Sequence[tuple[Any, ...]],
        numbers: Numbers | None,
    ) -> tuple[list[Item], Callable[[Item], Made] | None]:
        """Leaves with their gradients as the engine takes them, and what gives their numbers.

        Raises:
            TypeError, ValueError: a gradient that does not fit.
        """
        if numbers is not None:
            hypers = [made.hypers for made in numbers]
        items = [
            self._items[k]._replace(grad=gradients[k], hypers=hypers[self._groups[k]])
            for k in places
        ]
        for item in items:
            check_grad(item.param, item.grad, item.name)
        if numbers is None:
            return items, None
        groups = {id(self._items[k].state.step): self._groups[k] for k in places}
        return items, partial(_made, numbers, groups)

    def items(self, gradients: Sequence[Tensor], hypers: Sequence[tuple[Any, ...]]) -> list[Item]:
        """Return the leaves with these gradients, checked; arguments are those of :meth:`run`."""
        return self._leaves(range(len(self._items)), list(gradients), hypers, None)[0]

    def holds(self) -> bool:
        """Return True if leaves are what they were, and those of each chunk count alike."""
        for chunk in self._chunks:
            made = chunk.counts.common()
            if made is None or not (made or self._may_begin):
                return False
            chunk.made = made
        if self._others and not self._others_hold():
            return False
        return not self._tensors or self._guard.hold(self._tensors)

    def holds_but_for_counts(self) -> bool:
        """Return True if the plan holds, for a caller that has read the step counts."""
        there = self._guard.hold(self._tensors) if self._tensors else True
        return there and (not self._others or self._others_hold())

    def _others_hold(self) -> bool:
        started = self._may_begin or all(int(self._items[k].state.step) for k in self._others)
        return started and self._apart.hold()


def _real(state: Any) -> Any:
    return map_state(real_view, state)


def _made(numbers: Numbers, groups: Mapping[int, int], item: Item) -> Made:
    """The numbers of an item, by the group of its step count."""
    return numbers[groups[id(item.state.step)]]
