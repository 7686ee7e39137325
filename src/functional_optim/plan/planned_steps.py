"""PlannedSteps: the plans of all steps of certain leaves. They hold no tensor.

The key of a run's plan is its stages, its leaves, their counts, if the leaves are late, and the
names of their inputs. A Decision supplies the coefficients.

The tensors of a step are one list: parameters, state and other listed tensors, then a gradient or
None for each leaf, then copies of the inputs of leaves. A step with an optional input has no plan.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from functional_optim._torch import is_transforming, without_grad
from functional_optim.core.checks import check_measured
from functional_optim.core.fields import from_fields
from functional_optim.core.graph_capture import check_not_captured
from functional_optim.core.links import Links
from functional_optim.core.overrides import HYPERS, LeafChain
from functional_optim.kernels import Executor
from functional_optim.plan import leaf_by_leaf
from functional_optim.plan.addend_rows import Addends, is_simple
from functional_optim.plan.decision import Decision
from functional_optim.plan.guard import mask_of
from functional_optim.plan.leaf_inputs import rows_with_inputs
from functional_optim.plan.leaf_positions import LeafPositions, rows_of
from functional_optim.plan.list_layout import StepLayout
from functional_optim.plan.plain_steps import COUNTS, PlainSteps
from functional_optim.plan.planned_runs import (
    ENDS,
    USES,
    Counts,
    Mask,
    PlannedRun,
    PreparedStep,
    StepNow,
    bind_runs,
    copy_where,
    drop_least_used,
    prepared_step,
)
from functional_optim.plan.points import LeafPart, StageRun
from functional_optim.plan.shared_numbers import Written
from functional_optim.plan.step_counts import CountClasses, Numbers
from functional_optim.plan.step_leaves import ListedLeaves, StepLeaves
from functional_optim.plan.step_plan import StepPlan

MASKS = 32
"""Default number of sets of missing gradients for which plans are kept: as many as a model has
layers that are dropped in turn, or experts. The plans of a set take about 1 kB for each leaf."""

RUNS = 64
"""Number of runs, for each such set, for which plans are kept, unless one step has more."""


_step_leaves = from_fields(StepLeaves)


class PlannedSteps:
    """Plans of the steps of certain leaves, by missing gradients and step counts.

    Args:
        numbers: for each leaf, the number of its chain.
        places: for each leaf, its index in the tree.
        more: positions of tensors that a step writes to, and that belong to no leaf.
        masks: number of sets of missing gradients for which plans are kept.
        may_begin: True if plans may make the first step of a leaf. False if the state of a leaf
            may be created again before its first step.
        owns_shared: True if only steps and torch's operations write to the shared scalars. They
            are then read again only if a tensor's version has changed.
    """

    def __init__(
        self,
        executor: Executor,
        numbers: Sequence[int],
        *,
        places: Sequence[int] = (),
        more: Sequence[int] = (),
        masks: int = MASKS,
        may_begin: bool = False,
        owns_shared: bool = False,
    ) -> None:
        self._executor, self._numbers = executor, numbers
        self.rows: Sequence[LeafPositions] = ()
        """For each leaf, the positions of its tensors; empty before the first step with a Decision.

        The parameter of leaf ``k`` is at ``k``, and its gradient at ``k`` after all other tensors.
        """
        self._places, self._more = places or range(len(numbers)), more
        self._most, self._may_begin = masks, may_begin
        self._written = Written() if owns_shared else None
        self._planning = Lock()
        """Trees of one form share these plans, and several threads may step them."""
        self._plain = PlainSteps(executor, numbers, masks=masks, may_begin=may_begin)
        self._masks: dict[bytes | None, Mask] = {}

    def prepare(
        self,
        links: Links,
        chains: Sequence[LeafChain],
        tensors: list[Any],
        grads: list[Tensor | None],
        shared: Any,
        measured: Sequence[Tensor],
        extra: Mapping[str, Any],
        *,
        in_place: bool = True,
        begins: bool = False,
    ) -> PreparedStep | None:
        """Return a validated step, ready to run; None if no plan fits.

        Args:
            chains: by number, with the hyper-parameters of this step.
            grads: for each leaf, its gradient or None.
            in_place: False to step copies.
            begins: True if the state of leaves before their first step was created for this step.

        Raises:
            FloatingPointError, TypeError, ValueError, RuntimeError: as for any step; nothing has
                changed.
        """
        mask = mask_of(grads)
        plain = self._plain.masks.get(mask)
        if measured:
            check_measured([link.stage for link in links], measured)
        if extra:
            leaf_by_leaf.check_extra(links, extra)
        if plain is not None:
            hypers = list(map(HYPERS, chains))
            return plain.prepare(tensors, grads, hypers, measured, in_place=in_place, begins=begins)
        known, now = self._known(mask, tensors, grads, in_place=in_place)
        if known is None:
            return None
        before = shared if self._written is None else self._written.before(shared)
        leaves = self._leaves(known, now, chains, grads)
        rows = partial(self._rows_of, known, now) if known.sums else None
        if in_place and not known.layout.is_located:
            leaves = without_grad(leaves.copy_aliased_gradients)
        if known.on_cuda:
            check_not_captured(leaves.params)
        given = links, self._executor, leaves, before, measured, extra, rows
        decided = without_grad(Decision(*given).decide)
        may_begin = begins or self._may_begin
        return self._bind(known, decided, tensors, now, in_place=in_place, may_begin=may_begin)

    def _bind(
        self,
        known: Mask,
        decided: Decision,
        tensors: list[Any],
        now: StepNow,
        *,
        in_place: bool,
        may_begin: bool,
    ) -> PreparedStep | None:
        """Bind the runs of a decided step; None if a run has no plan that fits."""
        plans = self._plans_of(known, decided, now)
        if plans is None:
            return None
        kept: list[int] = []
        if not in_place:
            moved, kept = known.copied(decided.end, self.rows, len(tensors))
            tensors = copy_where(tensors, moved)
        after = [*tensors, *decided.grads]
        runs = bind_runs(plans, decided, after, may_begin=may_begin)
        if runs is None:
            return None
        return prepared_step((runs, decided.shared, decided.opened, after, kept, decided.end))

    def addends(
        self,
        links: Links,
        chains: Sequence[LeafChain],
        tensors: list[Any],
        grads: list[Tensor | None],
        shared: Any,
        measured: Sequence[Tensor],
    ) -> tuple[list[Tensor], Tensor] | None:
        """Return each leaf's addend to the next total, and a zero addend; None without a plan."""
        mask = mask_of(grads)
        plain = self._plain.masks.get(mask)
        if plain is not None:
            hypers = list(map(HYPERS, chains))
            return None if measured else plain.addends(tensors, grads, hypers)
        known, now = self._known(mask, tensors, grads, in_place=False)
        if known is None:
            return None
        rows = partial(self._rows_of, known, now) if known.sums else None
        leaves = self._leaves(known, now, chains, grads)
        decider = Decision(links, self._executor, leaves, shared, measured, {}, rows)
        with torch.no_grad():
            return decider.addends()

    def _known(
        self, mask: bytes | None, tensors: list[Any], grads: list[Tensor | None], *, in_place: bool
    ) -> tuple[Mask | None, StepNow]:
        """Return the Mask of a step, or None if there is none, and the tensors of the step."""
        known = self._masks.get(mask)
        now = StepNow([*tensors, *grads])
        if known is not None:
            known.used = next(USES)
        if known is None or not known.layout.holds(now.tensors, in_place=in_place):
            return None, now
        for counts in known.counts:
            if now.first(counts) is None:
                return None, now
        return known, now

    def _leaves(
        self, known: Mask, now: StepNow, chains: Sequence[LeafChain], grads: Sequence[Tensor | None]
    ) -> StepLeaves:
        leaves = ListedLeaves(self.rows, self._places, self._numbers, chains, now.tensors)
        params = now.tensors[: len(grads)]
        return _step_leaves((leaves, params, grads, self._numbers, chains, known.outline))

    def _plans_of(
        self, known: Mask, decided: Decision, now: StepNow
    ) -> list[tuple[PlannedRun, Numbers]] | None:
        """Return the plans of all runs, and the counts of their leaves; None if one has no plan."""
        names: tuple[str, ...] = ()
        if decided.inputs is not None:
            if decided.inputs.are_seldom:
                return None
            names = decided.inputs.names
        every = known.ends.get((decided.end, names))
        if every is None:
            found = [known.runs.get(_key(run, names)) for run in decided.end.runs]
            every = [one for one in found if one is not None]
            if len(every) < len(found):
                return None
            if len(known.ends) >= ENDS:
                known.ends.clear()
            known.ends[decided.end, names] = every
        plans = []
        for one in every:
            plan = now.first(one)
            if plan is None:
                return None
            plans.append(plan)
        return plans

    def run(self, prepared: PreparedStep, shared: Any) -> None:
        """Run a step in place, and update ``shared``."""
        if not prepared.numbers:
            for run in prepared.runs:
                run()
            return
        leaf_by_leaf.run_all(prepared.runs, prepared.numbers, prepared.opened, shared)
        if self._written is not None:
            self._written.after(shared, prepared.numbers)

    def plan(self, tensors: list[Any], leaves: StepLeaves) -> bool:
        """Plan a plain step before it runs; return False if the step is not plain."""
        if leaves.outline.plain is None or is_transforming():
            return False
        with self._planning:
            self._plain.plan(tensors, leaves)
        return True

    def prepare_decided(
        self,
        tensors: list[Any],
        leaves: StepLeaves,
        decided: Decision,
        *,
        in_place: bool = True,
    ) -> PreparedStep | None:
        """Plan the runs of a decided step that is not plain, and bind it by these plans.

        The state of leaves before their first step was created for this step.

        Args:
            in_place: False to step copies.

        Returns:
            None, with nothing changed, if no plan fits.
        """
        if leaves.outline.plain is not None or is_transforming():
            return None
        if is_simple([one for one in leaves.grads if one is not None]):
            with self._planning, torch.no_grad():
                self._plan_runs(tensors, leaves, decided, in_place=in_place)
        now = StepNow([*tensors, *leaves.grads])
        known = self._masks.get(mask_of(leaves.grads))
        if known is not None and known.layout.holds(now.tensors, in_place=in_place):
            return self._bind(known, decided, tensors, now, in_place=in_place, may_begin=True)
        return None

    def _plan_runs(
        self, tensors: list[Any], leaves: StepLeaves, decided: Decision, *, in_place: bool
    ) -> None:
        grads, runs, count = list(leaves.grads), decided.end.runs, len(tensors)
        every = [*tensors, *grads]
        if not self.rows:
            rows = rows_of(leaves.leaves, tensors, range(count, count + len(grads)))
            if rows is None or not is_simple([every[k] for row in rows for k in row.kept]):
                return
            self.rows = rows
        mask = mask_of(grads)
        known = self._masks.get(mask)
        is_full = known is not None and len(known.runs) + len(runs) > max(RUNS, 2 * len(runs))
        if known is None or is_full or not known.layout.holds(every, in_place=False):
            known = self._mask(leaves, every)
        if not known.layout.holds(every, in_place=in_place):
            return  # a step in place of tensors that share memory
        if mask not in self._masks and len(self._masks) >= self._most:
            self._masks = drop_least_used(self._masks, mask)
        now = StepNow([*tensors, *decided.grads])
        with_gradients = [one.members for one in leaves.outline.cohorts if one.has_gradients]
        for members in with_gradients:
            self._count(known, members, now)
        known.counts = [known.counts_of[members] for members in with_gradients]
        self._masks[mask] = known
        if decided.inputs is None or not decided.inputs.are_seldom:
            names = () if decided.inputs is None else decided.inputs.names
            for run in runs:
                self._plan(known, run, names, decided, now)

    def _mask(self, leaves: StepLeaves, every: list[Any]) -> Mask:
        pairs = zip(leaves.params, leaves.grads, strict=True)
        is_same = all(one.stride() == grad.stride() for one, grad in pairs if grad is not None)
        layout = StepLayout(self.rows, self._more, every)
        sums = is_same and bool(leaves.outline.summing)
        on_cuda = any(one.is_cuda for one in leaves.params)
        return Mask(leaves.outline, layout, sums=sums, on_cuda=on_cuda)

    def _plan(
        self, known: Mask, run: StageRun, names: tuple[str, ...], decided: Decision, now: StepNow
    ) -> None:
        """Plan a run, unless it has a plan."""
        part, tensors = run.part, now.tensors
        counted = self._count(known, part.members, now)
        rows = self._rows_at(part)
        has_inputs = bool(names) and any(one.inputs for one in part.stages)
        if has_inputs and decided.inputs is not None:
            rows = rows_with_inputs(part.stages, rows, names, len(tensors))
            tensors = [*tensors, *decided.inputs.copies(part)]
        plans = known.runs.setdefault(_key(run, names), [])
        before = [one for one in plans if one.counted is counted]
        if before and before[0].plan.is_for(tensors):
            return
        hypers = [decided.numbers.hypers_at(part, k) for k in part.members]
        items = [row.item(tensors, own) for row, own in zip(rows, hypers, strict=True)]
        plan = StepPlan(
            part.stages,
            self._executor,
            items,
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
        rows = map(self.rows.__getitem__, part.members)
        return [row._replace(states=tuple([row.states[k] for k in part.at])) for row in rows]

    def _count(self, known: Mask, members: tuple[int, ...], now: StepNow) -> CountClasses:
        """Return the count classes of leaves, from the counts of this step."""
        counts = known.counts_of.setdefault(members, [])
        first = now.first(counts)
        if first is not None:
            found: CountClasses = first[0].counted
            return found
        rows = [self.rows[k] for k in members]
        groups = [self._numbers[k] for k in members]
        made = Counts(CountClasses(rows, groups, now.tensors))
        counts[:] = [made, *counts[: COUNTS - 1]]
        return made.counted

    def _rows_of(
        self,
        known: Mask,
        now: StepNow,
        decider: Decision,
        part: LeafPart,
        totals: Sequence[Tensor],
    ) -> Sequence[Sequence[float]] | None:
        """Return the addends of each leaf of a part; None if each leaf must be reduced alone."""
        if decider.inputs:
            return None
        addends = known.addends.get(part, [])
        first = now.first(addends)
        if first is None:
            first = now.first(known.counts_of.get(part.members, []))
            if first is None:
                return None
            counts, numbers = first
            first = Addends(part, self._rows_at(part), counts.counted, now.tensors), numbers
            if len(known.addends) >= RUNS:
                known.addends.clear()
            known.addends[part] = [first[0], *addends[: COUNTS - 1]]
        found, numbers = first
        if not found.are_simple:
            return None
        rows: Sequence[Sequence[float]] = found.rows(decider, now.tensors, numbers, totals)
        return rows


def _key(run: StageRun, names: tuple[str, ...]) -> Any:
    part = run.part
    return part.at, run.is_late, names, part.members
