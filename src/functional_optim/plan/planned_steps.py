"""PlannedSteps: the plans of all steps of certain leaves, by missing gradients.

The tensors of a step are one list: parameters, state and other listed tensors, then a gradient or
None for each leaf, then copies of the inputs of leaves. Plans hold no tensor.
"""

from collections.abc import Sequence
from itertools import count
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from functional_optim._torch import is_transforming
from functional_optim.core.checks import check_measured
from functional_optim.kernels import Executor
from functional_optim.plan import leaf_by_leaf
from functional_optim.plan.addend_rows import is_simple
from functional_optim.plan.decided_steps import DecidedSteps
from functional_optim.plan.decision import Decision
from functional_optim.plan.guard import mask_of
from functional_optim.plan.leaf_positions import LeafPositions, rows_of
from functional_optim.plan.plain_steps import PlainSteps
from functional_optim.plan.planned_runs import PlanOptions, PreparedStep, StepInputs
from functional_optim.plan.shared_numbers import Written
from functional_optim.plan.step_leaves import StepLeaves

MASKS = 32
"""Default number of sets of missing gradients for which plans are kept: as many as a model has
layers that are dropped in turn, or experts. The plans of a set take about 1 kB for each leaf."""


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
        written = Written() if owns_shared else None
        own = places or range(len(numbers))
        self._options = PlanOptions(executor, numbers, own, more, written, may_begin)
        self.rows: Sequence[LeafPositions] = ()
        """For each leaf, the positions of its tensors; empty before the first step with a Decision.

        The parameter of leaf ``k`` is at ``k``, and its gradient at ``k`` after all other tensors.
        """
        self._most = masks
        self._planning = Lock()
        """Trees of one form share these plans, and several threads may step them."""
        self._masks: dict[bytes | None, PlainSteps | DecidedSteps] = {}
        self._clock = count(1)
        """Clock of the uses of plans, by which the least recently used ones are found."""

    def prepare(
        self, given: StepInputs, *, in_place: bool = True, begins: bool = False
    ) -> PreparedStep | None:
        """Return a validated step, ready to run; None if no plan fits.

        Args:
            in_place: False to step copies.
            begins: True if the state of leaves before their first step was created for this step.

        Raises:
            FloatingPointError, TypeError, ValueError, RuntimeError: as for any step; nothing has
                changed.
        """
        known = self._masks.get(mask_of(given.grads))
        if known is None:
            return None
        known.used = next(self._clock)
        if given.measured:
            check_measured([link.stage for link in given.links], given.measured)
        if given.extra:
            leaf_by_leaf.check_extra(given.links, given.extra)
        return known.prepare(given, in_place=in_place, begins=begins)

    def addends(self, given: StepInputs) -> tuple[list[Tensor], Tensor] | None:
        """Return each leaf's addend to the next total, and a zero addend; None without a plan."""
        known = self._masks.get(mask_of(given.grads))
        return None if known is None else known.addends(given)

    def run(self, prepared: PreparedStep, shared: Any) -> None:
        """Run a step in place, and update ``shared``."""
        if not prepared.numbers:
            for run in prepared.runs:
                run()
            return
        leaf_by_leaf.run_all(prepared.runs, prepared.numbers, prepared.opened, shared)
        if self._options.written is not None:
            self._options.written.after(shared, prepared.numbers)

    def plan(self, tensors: list[Any], leaves: StepLeaves) -> bool:
        """Plan a plain step before it runs; return False if the step is not plain.

        Args:
            leaves: checked.
        """
        if leaves.outline.plain is None or is_transforming():
            return False
        with self._planning:
            mask = mask_of(leaves.grads)
            known = self._masks.get(mask)
            if not isinstance(known, PlainSteps) or not known.is_for([*tensors, *leaves.grads]):
                known = PlainSteps.of(self._options, leaves, tensors)
            if known is not None and known.plan(tensors, leaves):
                self._keep(mask, known)
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
                self._plan_decided(tensors, leaves, decided, in_place=in_place)
        known = self._masks.get(mask_of(leaves.grads))
        if not isinstance(known, DecidedSteps):
            return None
        return known.prepare_decided(tensors, leaves, decided, in_place=in_place)

    def _plan_decided(
        self, tensors: list[Any], leaves: StepLeaves, decided: Decision, *, in_place: bool
    ) -> None:
        every = [*tensors, *leaves.grads]
        if not self.rows:
            grads = range(len(tensors), len(every))
            rows = rows_of(leaves.leaves, tensors, grads)
            if rows is None or not is_simple([every[k] for row in rows for k in row.kept]):
                return
            self.rows = rows
        mask = mask_of(leaves.grads)
        known = self._masks.get(mask)
        if not isinstance(known, DecidedSteps) or not known.has_room_for(decided.end, every):
            known = DecidedSteps(self._options, self.rows, leaves, every)
        if known.layout.holds(every, in_place=in_place):  # else tensors share memory
            self._keep(mask, known)
            known.plan([*tensors, *decided.grads], decided)

    def _keep(self, mask: bytes | None, known: PlainSteps | DecidedSteps) -> None:
        """Keep plans. If there are too many, drop those that were not used for longest."""
        known.used = next(self._clock)
        masks = {**self._masks, mask: known}  # another thread may be reading the old one
        if len(masks) > self._most:
            least = min(masks, key=lambda one: masks[one].used)
            del masks[least]
        self._masks = masks
