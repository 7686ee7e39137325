"""DecidedSteps: planned steps that need a Decision.

The key of a run's plan is its stages, its leaves, their counts, and the names of their inputs. A
Decision supplies the coefficients. A step with an optional input has no plan.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from functional_optim._torch.derivatives import without_grad
from functional_optim.core.graph_capture import check_not_captured
from functional_optim.core.named_tuples import from_fields
from functional_optim.plan.addend_rows import Addends
from functional_optim.plan.decision import Decision, Rows
from functional_optim.plan.leaf_inputs import rows_with_inputs
from functional_optim.plan.leaf_positions import LeafPositions
from functional_optim.plan.list_layout import StepLayout
from functional_optim.plan.planned_runs import (
    COUNTS,
    Counts,
    PlannedRun,
    PlanOptions,
    PreparedStep,
    StepInputs,
    StepNow,
    bind_runs,
    copy_where,
    prepared_step,
)
from functional_optim.plan.points import End, LeafPart, StageRun
from functional_optim.plan.step_counts import CountClasses, Numbers
from functional_optim.plan.step_leaves import ListedLeaves, StepLeaves
from functional_optim.plan.step_plan import StepPlan

ENDS = 64
"""Number of Ends whose plans are kept: late leaves may differ in each step."""

RUNS = 64
"""Number of runs for which plans are kept, unless one step has more."""

_step_leaves = from_fields(StepLeaves)


class DecidedSteps:
    """Plans of the steps in which the same gradients are missing, and which need a Decision."""

    def __init__(
        self,
        options: PlanOptions,
        rows: Sequence[LeafPositions],
        leaves: StepLeaves,
        every: list[Any],
    ) -> None:
        self._options, self._rows, self._outline = options, rows, leaves.outline
        self.layout = StepLayout(rows, options.more, every)
        """The layouts of all tensors."""
        pairs = zip(leaves.params, leaves.grads, strict=True)
        is_same = all(one.stride() == grad.stride() for one, grad in pairs if grad is not None)
        self._sums = is_same and bool(self._outline.summing)
        """True if leaves may be reduced together: gradients have the strides of parameters."""
        self._on_cuda = any(one.is_cuda for one in leaves.params)
        self._counts: list[list[Counts]] = []
        """The count classes of the leaves with gradients."""
        self._ends: dict[tuple[End, tuple[str, ...]], list[list[PlannedRun]]] = {}
        """The plans of all runs, by End and by the names of the inputs of leaves."""
        self._runs: dict[Any, list[PlannedRun]] = {}
        """The plans of each run, the latest first."""
        self._counts_of: dict[tuple[int, ...], list[Counts]] = {}
        """The count classes of the leaves of each cohort and run, the latest first."""
        self._addends: dict[LeafPart, list[Addends]] = {}
        """What leaves add to totals, for each part of the leaves."""
        self._copied: dict[End, tuple[list[bool], list[int]]] = {}
        self.used = 0
        """Time of the last use."""

    def prepare(self, given: StepInputs, *, in_place: bool, begins: bool) -> PreparedStep | None:
        """Decide a step and bind its runs: see :meth:`PlannedSteps.prepare`."""
        now = self._read(given, in_place=in_place)
        if now is None:
            return None
        written = self._options.written
        before = given.shared if written is None else written.before(given.shared)
        leaves = self._leaves(now, given)
        if in_place and not self.layout.is_located:
            leaves = without_grad(leaves.copy_aliased_gradients)
        if self._on_cuda:
            check_not_captured(leaves.params)
        rows = self.rows_of(now)
        executor, may_begin = self._options.executor, begins or self._options.may_begin
        totals, extra = given.measured, given.extra
        decision = Decision(given.links, executor, leaves, before, totals, extra, rows)
        decided = without_grad(decision.decide)
        return self.bind(decided, given.tensors, now, in_place=in_place, may_begin=may_begin)

    def bind(
        self,
        decided: Decision,
        tensors: list[Any],
        now: StepNow,
        *,
        in_place: bool,
        may_begin: bool,
    ) -> PreparedStep | None:
        """Bind the runs of a decided step; None if a run has no plan that fits.

        ``tensors`` is the list of the step, without gradients. ``may_begin`` is True if the state
        of leaves before their first step is valid.
        """
        plans = self._plans_of(decided, now)
        if plans is None:
            return None
        kept: list[int] = []
        if not in_place:
            moved, kept = self._copies(decided.end, len(tensors))
            tensors = copy_where(tensors, moved)
        after = [*tensors, *decided.grads]
        runs = bind_runs(plans, decided, after, may_begin=may_begin)
        if runs is None:
            return None
        return prepared_step((runs, decided.shared, decided.opened, after, kept, decided.end))

    def addends(self, given: StepInputs) -> tuple[list[Tensor], Tensor] | None:
        """Return each leaf's addend to the next total: see :meth:`PlannedSteps.addends`."""
        now = self._read(given, in_place=False)
        if now is None:
            return None
        rows = self.rows_of(now)
        executor, leaves = self._options.executor, self._leaves(now, given)
        shared, totals = given.shared, given.measured
        decider = Decision(given.links, executor, leaves, shared, totals, {}, rows)
        with torch.no_grad():
            return decider.addends()

    def _read(self, given: StepInputs, *, in_place: bool) -> StepNow | None:
        """Read the counts of a step; return None if layouts or counts do not fit."""
        now = StepNow([*given.tensors, *given.grads])
        if not self.layout.holds(now.tensors, in_place=in_place):
            return None
        for counts in self._counts:
            if now.first(counts) is None:
                return None
        return now

    def _leaves(self, now: StepNow, given: StepInputs) -> StepLeaves:
        numbers, chains, grads = self._options.numbers, given.chains, given.grads
        leaves = ListedLeaves(self._rows, self._options.places, numbers, chains, now.tensors)
        params = now.tensors[: len(grads)]
        return _step_leaves((leaves, params, grads, numbers, chains, self._outline))

    def _copies(self, end: End, count: int) -> tuple[list[bool], list[int]]:
        """Return which tensors a pure step copies, and which leaves it does not change."""
        found = self._copied.get(end)
        if found is None:
            if len(self._copied) >= ENDS:
                self._copied.clear()
            own = {k for run in end.runs for k in run.part.members}
            moved = {k for row in map(self._rows.__getitem__, own) for k in row.kept}
            kept = [k for k in range(len(self._rows)) if k not in own]
            found = self._copied[end] = [k in moved for k in range(count)], kept
        return found

    def _plans_of(self, decided: Decision, now: StepNow) -> list[tuple[PlannedRun, Numbers]] | None:
        """Return the plans of all runs, and the counts of their leaves; None if one has no plan."""
        names: tuple[str, ...] = ()
        if decided.inputs is not None:
            if decided.inputs.are_seldom:
                return None
            names = decided.inputs.names
        every = self._ends.get((decided.end, names))
        if every is None:
            found = [self._runs.get(_key(run, names)) for run in decided.end.runs]
            every = [one for one in found if one is not None]
            if len(every) < len(found):
                return None
            if len(self._ends) >= ENDS:
                self._ends.clear()
            self._ends[decided.end, names] = every
        plans = []
        for one in every:
            plan = now.first(one)
            if plan is None:
                return None
            plans.append(plan)
        return plans

    def has_room_for(self, end: End) -> bool:
        """Return True if there is room for the plans of more runs."""
        runs = len(end.runs)
        return len(self._runs) + runs <= max(RUNS, 2 * runs)

    def count(self, tensors: list[Any]) -> StepNow:
        """Read the counts of a step, and keep its count classes."""
        now = StepNow(tensors)
        with_gradients = [one.members for one in self._outline.cohorts if one.has_gradients]
        for members in with_gradients:
            self._count(members, now)
        self._counts = [self._counts_of[members] for members in with_gradients]
        return now

    def plan(self, tensors: list[Any], decided: Decision) -> None:
        """Plan the runs of a decided step."""
        now = self.count(tensors)
        if decided.inputs is None or not decided.inputs.are_seldom:
            names = () if decided.inputs is None else decided.inputs.names
            for run in decided.end.runs:
                self._plan(run, names, decided, now)

    def _plan(self, run: StageRun, names: tuple[str, ...], decided: Decision, now: StepNow) -> None:
        """Plan a run, unless it has a plan."""
        part, tensors = run.part, now.tensors
        counted = self._count(part.members, now)
        rows = self._rows_at(part)
        has_inputs = bool(names) and any(one.inputs for one in part.stages)
        if has_inputs and decided.inputs is not None:
            rows = rows_with_inputs(part.stages, rows, names, len(tensors))
            tensors = [*tensors, *decided.inputs.copies(part)]
        plans = self._runs.setdefault(_key(run, names), [])
        before = [one for one in plans if one.counted is counted]
        if before and before[0].plan.is_for(tensors):
            return
        plan = StepPlan(
            part.stages,
            self._options.executor,
            counted.groups,
            rows,
            tensors,
            counted=run.is_step,
            may_begin=True,
        )
        others = [one for one in plans if one.counted is not counted]
        plans[:] = [PlannedRun(counted, plan, has_inputs), *others[: COUNTS - 1]]

    def _rows_at(self, part: LeafPart) -> list[LeafPositions]:
        """Return the positions of the leaves of a part, with the states of its stages only."""
        rows = map(self._rows.__getitem__, part.members)
        return [row._replace(states=tuple([row.states[k] for k in part.at])) for row in rows]

    def _count(self, members: tuple[int, ...], now: StepNow) -> CountClasses:
        """Return the count classes of leaves, from the counts of this step."""
        counts = self._counts_of.setdefault(members, [])
        first = now.first(counts)
        if first is not None:
            found: CountClasses = first[0].counted
            return found
        rows = [self._rows[k] for k in members]
        groups = [self._options.numbers[k] for k in members]
        made = Counts(CountClasses(rows, groups, now.tensors))
        counts[:] = [made, *counts[: COUNTS - 1]]
        return made.counted

    def rows_of(self, now: StepNow) -> Rows | None:
        """Return the function that returns the addends of many leaves; None if there is none."""
        return partial(self._rows_of, now) if self._sums else None

    def _rows_of(
        self, now: StepNow, decider: Decision, part: LeafPart, totals: Sequence[Tensor]
    ) -> Sequence[Sequence[float]] | None:
        """Return the addends of each leaf of a part; None if each leaf must be reduced alone."""
        if decider.inputs:
            return None
        addends = self._addends.get(part, [])
        first = now.first(addends)
        if first is None:
            first = now.first(self._counts_of.get(part.members, []))
            if first is None:
                return None
            counts, numbers = first
            first = Addends(part, self._rows_at(part), counts.counted, now.tensors), numbers
            if len(self._addends) >= RUNS:
                self._addends.clear()
            self._addends[part] = [first[0], *addends[: COUNTS - 1]]
        found, numbers = first
        if not found.are_simple:
            return None
        rows: Sequence[Sequence[float]] = found.rows(decider, now.tensors, numbers, totals)
        return rows


def _key(run: StageRun, names: tuple[str, ...]) -> Any:
    part = run.part
    return part.at, names, part.members
