"""StepPlan: a step of leaves with certain layouts. It holds no tensor.

A plan stores what a step calls: tables of lengths, bound kernels, and positions in a list of
tensors. The list is an argument of each step. One call checks the layouts of all tensors and
returns their pointers, which are an argument of the kernels.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim._torch.derivatives import without_grad
from functional_optim.core.checks import check_grad
from functional_optim.core.interrupts import defer_interrupts
from functional_optim.core.leaf import PLAIN, Scalars
from functional_optim.core.named_tuples import from_fields
from functional_optim.core.stage import Stage
from functional_optim.kernels import Executor, Leaf
from functional_optim.kernels.chunks import extent_of
from functional_optim.kernels.kernel import Call, Part
from functional_optim.plan import item_steps
from functional_optim.plan.chunk_groups import chunks_of
from functional_optim.plan.guard import kinds_of
from functional_optim.plan.item import Item, StepScalars
from functional_optim.plan.leaf_positions import LeafPositions
from functional_optim.plan.list_layout import ListLayout, fills_memory
from functional_optim.plan.real_views import RealViews
from functional_optim.plan.step_counts import is_step_count
from functional_optim.plan.totals import Totals

Numbers = Sequence[StepScalars]
"""The coefficients of each group, from a Decision instead of the step counts."""


class BoundStep(NamedTuple):
    """Validated and bound step, ready to run."""

    loops: Any
    first: Call | None
    """Step the leaves that no kernel can step in their memory."""
    parts: Sequence[Part]
    """Step all other leaves."""
    tensors: list[Tensor]
    """The tensors of the step. Calls hold only their addresses, so the tensors must stay alive."""
    changed: list[int]
    """Positions of tensors that kernels write to without telling autograd."""
    counted: list[int]
    """Positions of the step counts to increase; none if the caller counts."""
    steps: Sequence[int]
    """The position of each leaf's step count."""
    totals: Sequence[Tensor]

    def run(self) -> None:
        """Run the step."""
        if self.changed:
            self.loops.bump(self.tensors, self.changed)
        if self.first is not None:
            self.first()
        if len(self.parts) == 1:
            self.parts[0][1]()
        elif self.parts:
            defer_interrupts(self._in_turn)
        if self.counted:
            self.loops.advance_each(self.tensors, self.counted)

    def _in_turn(self) -> None:
        """Run all parts. If a part raises, count the parts before it."""
        done = 0
        try:
            with torch.no_grad():
                for _, call in self.parts:
                    call()
                    done += 1
        except BaseException:
            stepped = chain.from_iterable(members for members, _ in self.parts[:done])
            if done and self.counted:
                self.loops.advance_each(self.tensors, [self.steps[k] for k in stepped])
            raise


_bound_step = from_fields(BoundStep)


class StepPlan:
    """A step of leaves with certain layouts.

    Args:
        groups: for each leaf, the index of its group of hyper-parameters.
        rows: for each leaf, the positions of its tensors in the list of a step.
        tensors: the list of such a step. All leaves are checked. No reference to a tensor is kept.
        counted: True if a step increases the step counts.
        may_begin: True if the plan may make the first step of a leaf. False if the state of a leaf
            may be created again before its first step.
        is_checked: False if the executor must check one leaf of each kind in the first step.
        scalars: the form of the coefficients. On the device, they are the ``numbers`` of
            :meth:`prepare`, with all totals.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        executor: Executor,
        groups: Sequence[int],
        rows: Sequence[LeafPositions],
        tensors: list[Tensor],
        *,
        counted: bool = True,
        may_begin: bool = False,
        is_checked: bool = True,
        scalars: Scalars = Scalars.HOST,
    ) -> None:
        self._stages, self._executor = stages, executor
        every_of = [row.all for row in rows]
        self._real = RealViews.among(every_of, tensors)
        if self._real is not None:
            tensors = self._real.of(tensors) or tensors
        self._groups, self._rows = list(groups), rows
        self._steps_of = [row.step for row in rows]
        self._may_begin, self._counts = may_begin, counted
        with torch.no_grad():
            given = stages, executor, rows, every_of, tensors, groups, scalars
            self._chunks, self.others, kinds = chunks_of(*given)
        """The leaves in chunks, and the indices of the leaves that are stepped alone."""
        others = set(self.others)
        self._kinds_to_ask = [k for k in kinds if k not in others and not is_checked]
        members = [chunk.members for chunk in self._chunks]
        self._totals = Totals(stages, members, [tensors[row.param] for row in rows])
        written_of = [[param, *states] for param, _, *states in every_of]
        together = [k for k in range(len(rows)) if k not in others]
        counts = [self._steps_of[k] for k in together]
        self._counted = counts if counted else []
        self._stepped = sorted([row.grad for row in rows])
        changed = {k for own in members for index in own for k in written_of[index]}
        self._changed = sorted(changed)
        written = changed.union(counts, *written_of)
        every = written.union(self._steps_of)
        self.written = [k in every for k in range(len(tensors))]
        """For each tensor, True if the step writes to it."""
        alone = [k for index in self.others for k in written_of[index]]
        self._loose = [k for k in alone if not fills_memory(tensors[k])]
        """Written tensors, of leaves that are stepped alone, that are not dense in memory."""
        used = written.union(*[every_of[k] for k in together])
        self._alone = alone
        is_host = scalars is Scalars.HOST  # else steps are counted on the device
        self._steps_alone = [rows[index].step for index in self.others if is_host]
        self._kinds = kinds_of([tensors[k] for k in alone])
        places = [k for own in members for index in own for k in every_of[index]]
        self._layout = ListLayout(
            tensors, used - set(self._loose), written, places, leaves=len(rows)
        )

    def is_for(self, tensors: list[Tensor]) -> bool:
        """Return True if the tensors have the layouts of the plan, at any address.

        The step counts of leaves that are stepped together must also be equal.
        """
        loops = self._layout.loops
        for chunk in self._chunks:
            count = loops.common(tensors, chunk.steps)
            if count is None or count is False:
                return False
        views = tensors if self._real is None else self._real.of(tensors)
        if views is None or any(fills_memory(views[k]) for k in self._loose):
            return False  # a new plan can step these leaves together
        return self._layout.hold(views)

    def prepare(
        self,
        tensors: list[Tensor],
        hypers: Sequence[tuple[Any, ...]],
        measured: Sequence[Tensor] = (),
        *,
        numbers: Numbers | None = None,
        begins: bool = False,
    ) -> BoundStep | None:
        """Check and bind a step; None, with nothing changed, if the plan does not fit.

        Args:
            hypers: of each group, checked.
            measured: the totals, if other processes contribute to them.
            numbers: of each group, instead of ``hypers`` and step counts.
            begins: True if the state of leaves before their first step was created for this step.

        Raises:
            TypeError, ValueError, RuntimeError: a gradient that does not fit.
            KernelError, NotPointwiseError: the executor cannot step the leaves.
        """
        if self._real is not None:
            views = self._real.of(tensors)
            if views is None:
                return None
            tensors = views
        loops, may_begin = self._layout.loops, begins or self._may_begin
        every: list[StepScalars] = []
        for chunk in self._chunks:  # as a rule one
            if numbers is not None:
                every.append(numbers[chunk.group])
                continue
            count = loops.common(tensors, chunk.steps)
            if count is None or count is False or not (count or may_begin):
                return None
            every.append(chunk.scalars_at(hypers[chunk.group], count + 1.0))
        pointers = self._layout.locate(tensors)
        if pointers is None or (
            self.others and not self._others_hold(tensors, numbers is not None or may_begin)
        ):
            return None
        if self._kinds_to_ask:
            self._require(tensors, hypers, every)
        is_known = len(measured) >= self._totals.count
        totals = (
            measured if is_known else self._totals_of(tensors, hypers, every, measured, numbers)
        )
        parts: list[Part] = []
        others = self.others
        for chunk, made in zip(self._chunks, every, strict=True):
            bound = chunk.bind(tensors, made, pointers, totals)
            if bound is None:
                others = [*others, *chunk.members]
            else:
                parts += bound
        first = self._bind_alone(others, tensors, hypers, numbers, totals) if others else None
        changed = self._changed if parts else []
        is_usual = len(others) == len(self.others)
        counted = self._counted if is_usual else self._counted_beside(others)
        steps = self._steps_of
        return _bound_step((loops, first, parts, tensors, changed, counted, steps, totals))

    def _bind_alone(
        self,
        others: Sequence[int],
        tensors: list[Tensor],
        hypers: Sequence[tuple[Any, ...]],
        numbers: Numbers | None,
        totals: Sequence[Tensor],
    ) -> Call:
        """Bind the step of leaves that no kernel steps."""
        items, scalars_of = self._items(sorted(others), tensors, hypers, numbers)
        given = self._stages, self._executor, items, totals, scalars_of
        return item_steps.prepare(*given, counts=self._counts)

    def _counted_beside(self, others: Sequence[int]) -> list[int]:
        """Return positions of the step counts to increase, if the engine counts some leaves."""
        alone = {self._rows[k].step for k in others}
        return [k for k in self._counted if k not in alone]

    def _require(
        self, tensors: list[Tensor], hypers: Sequence[tuple[Any, ...]], every: Sequence[StepScalars]
    ) -> None:
        """Raise RuntimeError or KernelError if the executor cannot step leaves in chunks."""
        numbers = {k: n for n, chunk in enumerate(self._chunks) for k in chunk.members}
        asked = [k for k in self._kinds_to_ask if k in numbers]
        items, _ = self._items(asked, tensors, hypers, None)
        made = {id(one.state.step): every[numbers[k]] for k, one in zip(asked, items, strict=True)}
        stages, executor = self._stages, self._executor
        item_steps.require(stages, executor, items, lambda item: made[id(item.state.step)])
        self._kinds_to_ask = []

    def addends(self, tensors: list[Tensor], hypers: Sequence[tuple[Any, ...]]) -> Tensor | None:
        """Return what each leaf adds to the first total, in the order of the leaves.

        Returns:
            None if each leaf must be reduced alone, or the tensors have other layouts.
        """
        if self.others or not self._chunks or not self._totals.count:
            return None
        views = tensors if self._real is None else self._real.of(tensors)
        if views is None or not self.is_for(tensors):
            return None
        tensors, own = views, []
        for chunk in self._chunks:
            count = self._layout.loops.common(tensors, chunk.steps)
            own.append(chunk.scalars_at(hypers[chunk.group], count + 1.0))
        grads = list(map(tensors.__getitem__, self._stepped))
        leaf = partial(self._leaf, tensors)
        return self._totals.each(self._chunks[0].executor, own, grads, leaf)

    def _leaf(self, tensors: list[Tensor], k: int, numbers: StepScalars) -> Leaf:
        """Return a leaf as stages see it."""
        return self._rows[k].leaf(tensors, numbers)

    def _others_hold(self, tensors: list[Tensor], may_begin: bool) -> bool:
        """Return True if the plan is still valid for the leaves that are stepped alone."""
        alone = [tensors[k] for k in self._alone]
        if not all(isinstance(one, Tensor) for one in alone) or kinds_of(alone) != self._kinds:
            return False
        if not all(is_step_count(tensors[k]) for k in self._steps_alone):
            return False  # an entry of a state dict in torch's form
        if any(fills_memory(tensors[k]) for k in self._loose):
            return False
        loose = [tensors[k] for k in self._loose if type(tensors[k]) in PLAIN]
        if loose and not _are_apart(loose, self._layout.fixed(tensors)):
            return False
        return may_begin or all(int(tensors[self._rows[k].step]) for k in self.others)

    def _totals_of(
        self,
        tensors: list[Tensor],
        hypers: Sequence[tuple[Any, ...]],
        every: Sequence[StepScalars],
        measured: Sequence[Tensor],
        numbers: Numbers | None,
    ) -> Sequence[Tensor]:
        """Return the totals of all measured stages: the known totals, then the computed ones."""
        if not self._chunks:
            return measured
        if self.others:
            items, scalars_of = self._items(range(len(self._rows)), tensors, hypers, numbers)
            return item_steps.totals(self._stages, self._executor, items, scalars_of, measured)
        grads = list(map(tensors.__getitem__, self._stepped))
        executor, leaf = self._chunks[0].executor, partial(self._leaf, tensors)
        return without_grad(self._totals.of, executor, every, grads, measured, leaf)

    def _items(
        self,
        indices: Sequence[int],
        tensors: Sequence[Tensor],
        hypers: Sequence[tuple[Any, ...]],
        numbers: Numbers | None,
    ) -> tuple[list[Item], Callable[[Item], StepScalars] | None]:
        """Return leaves as items of the engine, and a function that returns their coefficients."""
        if numbers is not None:
            hypers = [made.hypers for made in numbers]
        items = [self._rows[k].item(tensors, hypers[self._groups[k]]) for k in indices]
        for item in items:
            check_grad(item.param, item.grad, item.name)
        if numbers is None:
            return items, None
        groups = {
            id(item.state.step): self._groups[k] for k, item in zip(indices, items, strict=True)
        }
        return items, partial(_made, numbers, groups)


def _are_apart(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Return True if no tensor of ``some`` shares memory with a tensor of ``others``."""
    spans = [(one.data_ptr(), one.data_ptr() + extent_of(one)) for one in some if one.numel()]
    for other in others:
        start = other.data_ptr()
        end = start + other.nbytes
        if any(start < stop and begin < end for begin, stop in spans):
            return False
    return True


def _made(numbers: Numbers, groups: Mapping[int, int], item: Item) -> StepScalars:
    """Return the coefficients of an item, by the group of its step count."""
    return numbers[groups[id(item.state.step)]]
