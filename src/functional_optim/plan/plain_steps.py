"""PlainSteps: planned steps of plain chains, whose stages all run, with totals of each run."""

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, Self

import torch
from torch import Tensor

from functional_optim.core.graph_capture import check_not_captured
from functional_optim.core.overrides import HYPERS
from functional_optim.plan.addend_rows import is_simple
from functional_optim.plan.leaf_positions import LeafPositions, rows_of
from functional_optim.plan.list_layout import StepLayout
from functional_optim.plan.planned_runs import (
    COUNTS,
    PlanOptions,
    PreparedStep,
    StepInputs,
    copy_where,
    prepared_step,
)
from functional_optim.plan.points import StageRun
from functional_optim.plan.step_leaves import StepLeaves
from functional_optim.plan.step_plan import StepPlan

_IS_CUDA = attrgetter("is_cuda")

TRIES = 3
"""Number of times that a step is planned if no plan takes its tensors (shared memory)."""


class PlainSteps:
    """Plans of the plain steps in which the same gradients are missing.

    Args:
        layout: of the tensors of all runs, to find shared memory, and of frozen leaves with
            gradients; None for a single run without such leaves.
        kept: indices of the leaves that a step does not change.
    """

    def __init__(
        self,
        options: PlanOptions,
        leaves: StepLeaves,
        layout: StepLayout | None,
        kept: Sequence[int],
    ) -> None:
        assert leaves.outline.plain is not None, "checked before"
        self.outline, self.end, self.layout = leaves.outline, leaves.outline.plain, layout
        self._options, self._kept = options, kept
        self._plans: list[list[StepPlan]] = [[] for _ in self.end.runs]
        """For each run, its plans, the latest first."""
        self._written: list[bool] = []
        """For each tensor, whether a step writes to it."""
        self._on_cuda = any(map(_IS_CUDA, [leaf.param for leaf in leaves.stepped]))
        self._failed = 0
        """Number of plans that did not take the tensors of the step that they were built for."""
        self.used = 0
        """Time of the last use."""

    @classmethod
    def of(cls, options: PlanOptions, leaves: StepLeaves, tensors: list[Any]) -> Self | None:
        """Return an object without plans; None if shared memory of runs cannot be found."""
        assert leaves.outline.plain is not None, "checked before"
        members = leaves.outline.plain.members
        own = {k for one in members for k in one}
        kept = [k for k in range(len(leaves.grads)) if k not in own]
        # Frozen leaves are not stepped, but their gradients are checked.
        frozen = [k for k in kept if leaves.grads[k] is not None]
        if len(members) < 2 and not frozen:
            return cls(options, leaves, None, kept)
        looked_at = [*chain.from_iterable(members), *frozen]
        rows = _rows(leaves, tensors, looked_at)
        every = [*tensors, *leaves.grads]
        if rows is None or not is_simple([every[k] for row in rows for k in (row.grad, *row.kept)]):
            return None
        layout = StepLayout(rows, (), every)
        return cls(options, leaves, layout, kept) if layout.is_located else None

    def is_for(self, tensors: list[Any]) -> bool:
        """Return True if tensors that runs must not share have the layouts of the plans."""
        return self.layout is None or self.layout.holds(tensors, in_place=False)

    def prepare(self, given: StepInputs, *, in_place: bool, begins: bool) -> PreparedStep | None:
        """Bind every run; return None if one of them has no plan."""
        tensors = given.tensors if in_place else copy_where(given.tensors, self._written)
        every, runs = [*tensors, *given.grads], []
        if self.layout is not None and not self.layout.holds(every, in_place=in_place):
            return None
        if self._on_cuda:
            params = every[: len(given.grads)]
            check_not_captured(one for one in params if isinstance(one, Tensor))
        hypers, measured = list(map(HYPERS, given.chains)), given.measured
        for run, plans in zip(self.end.runs, self._plans, strict=True):
            totals = self.outline.taken(run.part, measured) if measured else ()
            for plan in plans:
                steps = plan.prepare(every, hypers, totals or (), begins=begins)
                if steps is not None:
                    runs.append(steps.run)
                    break
            else:
                return None
        return prepared_step((runs, (), (), every, self._kept, self.end))

    def addends(self, given: StepInputs) -> tuple[list[Tensor], Tensor] | None:
        """Return each leaf's addend to the first total, and a zero addend.

        The result is None if each leaf must be reduced alone, or if a total is known.
        """
        if given.measured:
            return None
        count, every = len(given.grads), [*given.tensors, *given.grads]
        nothing = torch.zeros((), dtype=torch.float64, device="cpu")
        first = self.outline.summing[:1]
        if not any(place in run.part.places for place in first for run in self.end.runs):
            return [nothing] * count, nothing  # no leaf with a gradient has the stage
        for plan in self._plans[0] if len(self._plans) == 1 else ():
            each = plan.addends(every, list(map(HYPERS, given.chains)))
            if each is not None:
                found = dict(zip(self.end.members[0], each.unbind(), strict=True))
                return [found.get(k, nothing) for k in range(count)], nothing
        return None

    def plan(self, tensors: list[Any], leaves: StepLeaves) -> bool:
        """Plan all runs; return False if no plan takes the tensors of such steps."""
        every = [*tensors, *leaves.grads]
        rows = [_rows(leaves, tensors, run.part.members) for run in self.end.runs]
        if self._failed >= TRIES:
            return False
        for run, own, plans in zip(self.end.runs, rows, self._plans, strict=True):
            if own is None:
                return False  # a tensor is in no list, such as a part of a sparse state
            if any(plan.is_for(every) for plan in plans):
                continue
            plan = self._plan(run, own, every)
            if plan.is_for(every):
                # Before the plan is stored: another thread may then run a step at once.
                written = [one.written for one in (plan, *chain.from_iterable(self._plans))]
                self._written = list(map(any, zip(*written, strict=True)))
                plans[:] = [plan, *plans[: COUNTS - 1]]
            else:
                self._failed += 1
        return True

    def _plan(self, run: StageRun, rows: Sequence[LeafPositions], every: list[Any]) -> StepPlan:
        return StepPlan(
            run.part.stages,
            self._options.executor,
            [self._options.numbers[k] for k in run.part.members],
            rows,
            every,
            may_begin=self._options.may_begin,
            is_checked=False,
        )


def _rows(
    leaves: StepLeaves, tensors: list[Any], members: Sequence[int]
) -> list[LeafPositions] | None:
    """Return the positions of some leaves; None if the list lacks a tensor."""
    count = len(tensors)
    own = [leaves.leaves[k] for k in members]
    return rows_of(own, tensors, [count + k for k in members])
