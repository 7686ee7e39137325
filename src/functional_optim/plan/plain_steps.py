"""Planned steps of plain chains: every stage runs, and each run computes its own totals."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.graph_capture import check_not_captured
from functional_optim.kernels import Executor
from functional_optim.plan.addend_rows import is_simple
from functional_optim.plan.guard import mask_of
from functional_optim.plan.item import Item
from functional_optim.plan.leaf_positions import LeafPositions, rows_of
from functional_optim.plan.list_layout import StepLayout
from functional_optim.plan.planned_runs import (
    USES,
    PreparedStep,
    copy_where,
    drop_least_used,
    prepared_step,
)
from functional_optim.plan.points import Outline, StageRun
from functional_optim.plan.step_leaves import StepLeaves
from functional_optim.plan.step_plan import StepPlan

COUNTS = 4
"""Number of plans that are kept for a run, one for each way in which leaves share counts."""

TRIES = 3
"""Number of times that a step is planned if no plan takes its tensors (shared memory)."""


class PlainMask:
    """Plans of the steps in which the same gradients are missing.

    Args:
        layout: of the tensors of all runs, to find shared memory, and of frozen leaves with
            gradients; None for a single run without such leaves.
        kept: indices of the leaves that a step does not change.
    """

    def __init__(self, outline: Outline, layout: StepLayout | None, kept: Sequence[int]) -> None:
        assert outline.plain is not None, "checked before"
        self.outline, self.end, self.layout = outline, outline.plain, layout
        self.plans: list[list[StepPlan]] = [[] for _ in self.end.runs]
        """For each run, its plans, the latest first."""
        self.written: list[bool] = []
        """For each tensor, whether a step writes to it."""
        self.kept = kept
        self.on_cuda = False
        """True if a parameter is on a CUDA device: a step must not be captured there."""
        self.failed = 0
        """Number of plans that did not take the tensors of the step that they were built for."""
        self.used = next(USES)
        """Time of the last use."""

    def prepare(
        self,
        tensors: list[Any],
        grads: list[Tensor | None],
        hypers: Sequence[tuple[Any, ...]],
        measured: Sequence[Tensor],
        *,
        in_place: bool,
        begins: bool = False,
    ) -> PreparedStep | None:
        """Bind every run; None if one of them has no plan.

        Args:
            grads: one for each leaf.
            hypers: of each group of leaves.
            in_place: False to step copies.
            begins: as for :meth:`StepPlan.prepare`.
        """
        self.used = next(USES)
        if not in_place:
            tensors = copy_where(tensors, self.written)
        every, runs = [*tensors, *grads], []
        if self.layout is not None and not self.layout.holds(every, in_place=in_place):
            return None
        if self.on_cuda:
            check_not_captured(one for one in every[: len(grads)] if isinstance(one, Tensor))
        for run, plans in zip(self.end.runs, self.plans, strict=True):
            given = self.outline.taken(run.part, measured) if measured else ()
            for plan in plans:
                # Copies of leaves that are stepped alone may have other strides.
                may = in_place or not plan.others
                steps = None
                if may:
                    steps = plan.prepare(every, hypers, given or (), begins=begins)
                if steps is not None:
                    runs.append(steps.run)
                    break
            else:
                return None
        return prepared_step((runs, (), (), every, self.kept, self.end))

    def is_for(self, tensors: list[Any]) -> bool:
        """Return True if tensors that runs must not share have the layouts of the plans."""
        return self.layout is None or self.layout.holds(tensors, in_place=False)

    def addends(
        self, tensors: list[Any], grads: list[Tensor | None], hypers: Sequence[tuple[Any, ...]]
    ) -> tuple[list[Tensor], Tensor] | None:
        """Return each leaf's addend to the first total, and a zero addend.

        Returns:
            None if each leaf must be reduced alone.
        """
        every = [*tensors, *grads]
        nothing = torch.zeros((), dtype=torch.float64, device="cpu")
        first = self.outline.summing[:1]
        if not any(place in run.part.places for place in first for run in self.end.runs):
            return [nothing] * len(grads), nothing  # no leaf with a gradient has the stage
        for plan in self.plans[0] if len(self.plans) == 1 else ():
            each = plan.addends(every, hypers)
            if each is not None:
                found = dict(zip(self.end.members[0], each.unbind(), strict=True))
                return [found.get(k, nothing) for k in range(len(grads))], nothing
        return None


class PlainSteps:
    """Plans of the steps of plain chains, by missing gradients.

    Args:
        groups: for each leaf, the number of its chain.
        masks: number of sets of missing gradients for which plans are kept.
        may_begin: as for :class:`StepPlan`.
    """

    def __init__(
        self, executor: Executor, groups: Sequence[int], *, masks: int, may_begin: bool
    ) -> None:
        self._executor, self._groups = executor, groups
        self._most, self._may_begin = masks, may_begin
        self.masks: dict[bytes | None, PlainMask] = {}
        """Plans of steps, by missing gradients."""

    def plan(self, tensors: list[Any], leaves: StepLeaves) -> None:
        """Plan the step of leaves that have been checked."""
        end, mask = leaves.outline.plain, mask_of(leaves.grads)
        assert end is not None, "checked before"
        every = [*tensors, *leaves.grads]
        rows = []
        for run in end.runs:
            own = self._rows(run, leaves, tensors)
            if own is None:
                return  # a tensor is in no list, such as a part of a sparse state
            rows.append(own)
        known = self.masks.get(mask)
        if known is None or not known.is_for(every):
            known = _mask(leaves.outline, rows, leaves, tensors)
        if known is None or known.failed >= TRIES:
            return
        known.on_cuda = any(leaf.param.is_cuda for leaf in leaves.stepped)
        for run, own, plans in zip(end.runs, rows, known.plans, strict=True):
            if any(plan.is_for(every) for plan in plans):
                continue
            plan = self._plan(run, own, leaves, every)
            if plan.is_for(every):
                # Before the plan is stored: another thread may then run a step at once.
                written = [one.written for one in (plan, *chain.from_iterable(known.plans))]
                known.written = [any(column) for column in zip(*written, strict=True)]
                plans[:] = [plan, *plans[: COUNTS - 1]]
            else:
                known.failed += 1
        if mask not in self.masks and len(self.masks) >= self._most:
            self.masks = drop_least_used(self.masks, mask)
        self.masks[mask] = known

    def _rows(
        self, run: StageRun, leaves: StepLeaves, tensors: list[Any]
    ) -> list[LeafPositions] | None:
        """Return the positions of the leaves of a run; None if the list lacks a tensor."""
        members, count = run.part.members, len(tensors)
        own = [leaves.leaves[k] for k in members]
        return rows_of(own, tensors, [count + k for k in members])

    def _plan(
        self, run: StageRun, rows: Sequence[LeafPositions], leaves: StepLeaves, every: list[Any]
    ) -> StepPlan:
        members = run.part.members
        groups = [self._groups[k] for k in members]
        hypers = [leaves.chains[leaves.groups[k]].hypers for k in members]
        items = []
        for row, own, k in zip(rows, hypers, members, strict=True):
            leaf = leaves.leaves[k]
            items.append(Item(leaf.param, every[row.grad], leaf.state, own, leaf.name))
        kinds = {_kind(item): k for k, item in enumerate(items)}
        return StepPlan(
            run.part.stages,
            self._executor,
            items,
            groups,
            rows,
            every,
            may_begin=self._may_begin,
            kinds=list(kinds.values()),
        )


def _kind(item: Item) -> Any:
    """Return a key that is equal for leaves that a rule cannot tell apart."""
    param, grad, hypers = item.param, item.grad, item.hypers
    strides = grad.stride() if grad.layout == torch.strided else None
    return id(hypers), param.shape, param.dtype, param.stride(), strides


def _mask(
    outline: Outline, rows: Sequence[Any], leaves: StepLeaves, tensors: list[Any]
) -> PlainMask | None:
    """Return a PlainMask without plans; None if shared memory of runs cannot be found."""
    assert outline.plain is not None, "checked before"
    own, count = {k for members in outline.plain.members for k in members}, len(tensors)
    kept = [k for k in range(len(leaves.grads)) if k not in own]
    # Frozen leaves are not stepped, but their gradients are checked.
    frozen = [k for k in kept if leaves.grads[k] is not None]
    if len(rows) < 2 and not frozen:
        return PlainMask(outline, None, kept)
    others = rows_of([leaves.leaves[k] for k in frozen], tensors, [count + k for k in frozen])
    every, found = [*tensors, *leaves.grads], [*chain.from_iterable(rows), *(others or ())]
    if others is None or not is_simple([every[k] for row in found for k in (row.grad, *row.kept)]):
        return None
    layout = StepLayout(found, (), every)
    return PlainMask(outline, layout, kept) if layout.is_located else None
