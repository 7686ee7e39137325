"""PlannedSteps: the plans of all steps of certain leaves, by missing gradients.

The tensors of a step are one list: parameters, state and other listed tensors, then a gradient or
None for each leaf, then copies of the inputs of leaves. Plans hold no tensor.
"""

from collections.abc import Callable, Sequence
from itertools import count
from threading import Lock
from typing import Any

from torch import Tensor

from functional_optim._torch.derivatives import is_transforming
from functional_optim.core.checks import check_measured
from functional_optim.kernels import Executor
from functional_optim.plan import leaf_by_leaf
from functional_optim.plan.addend_rows import is_simple
from functional_optim.plan.decided_steps import DecidedSteps
from functional_optim.plan.decision import Decision, Rows
from functional_optim.plan.guard import mask_of
from functional_optim.plan.leaf_positions import LeafPositions, rows_of
from functional_optim.plan.plain_steps import PlainSteps
from functional_optim.plan.planned_runs import PlanOptions, PreparedStep, StepInputs
from functional_optim.plan.shared_numbers import Written
from functional_optim.plan.step_leaves import StepLeaves

MASKS = 32
"""Default number of sets of missing gradients for which plans are kept. It is enough for a model
with 32 experts, or that drops one of 32 layers at a time. The plans of a set take about 1 kB per
leaf."""


class PlannedSteps:
    """Plans of the steps of certain leaves, by missing gradients and step counts.

    Args:
        numbers: for each leaf, the number of its chain.
        places: for each leaf, its position in the tree.
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
        """Counter of the uses of plans, to find the least recently used plans."""

    def prepare(
        self, given: StepInputs, *, in_place: bool = True, begins: bool = False
    ) -> PreparedStep | None:
        """Return a validated step, ready to run; None if no plan fits.

        A step that is not in place steps copies. ``begins`` is True if the state of leaves before
        their first step was created for this step.
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
        """Plan a plain step before it runs; return False if the step is not plain."""
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

    def decide(
        self,
        tensors: list[Any],
        leaves: StepLeaves,
        decide: Callable[[Rows | None], Decision],
        *,
        in_place: bool = True,
    ) -> tuple[Decision, PreparedStep | None]:
        """Decide a step, plan its runs if it is not plain, and bind it by these plans.

        The state of leaves before their first step was created for this step. The caller turns
        autograd off. The step is None, with nothing changed, if no plan fits.
        """
        with self._planning:
            known = self._decided_for(tensors, leaves, in_place=in_place)
            now = None if known is None else known.count([*tensors, *leaves.grads])
        if known is None or now is None:
            return decide(None), None
        decided = decide(known.rows_of(now))
        with self._planning:
            if not known.has_room_for(decided.end):
                known = DecidedSteps(self._options, self.rows, leaves, now.tensors)
            self._keep(mask_of(leaves.grads), known)
            known.plan([*tensors, *decided.grads], decided)
        return decided, known.bind(decided, tensors, now, in_place=in_place, may_begin=True)

    def _decided_for(
        self, tensors: list[Any], leaves: StepLeaves, *, in_place: bool
    ) -> DecidedSteps | None:
        """Return the plans of a step that needs a Decision, new or known.

        The result is None if no plan can step the leaves: they are not plain tensors, or share
        memory.
        """
        if leaves.outline.plain is not None or is_transforming():
            return None
        if not is_simple([one for one in leaves.grads if one is not None]):
            return None
        every = [*tensors, *leaves.grads]
        if not self.rows:
            grads = range(len(tensors), len(every))
            rows = rows_of(leaves.leaves, tensors, grads)
            if rows is None or not is_simple([every[k] for row in rows for k in row.kept]):
                return None
            self.rows = rows
        known = self._masks.get(mask_of(leaves.grads))
        if not isinstance(known, DecidedSteps) or not known.layout.holds(every, in_place=False):
            known = DecidedSteps(self._options, self.rows, leaves, every)
        return known if known.layout.holds(every, in_place=in_place) else None

    def _keep(self, mask: bytes | None, known: PlainSteps | DecidedSteps) -> None:
        """Store plans. If there are too many, drop the least recently used ones."""
        known.used = next(self._clock)
        masks = {**self._masks, mask: known}  # another thread may be reading the old one
        if len(masks) > self._most:
            least = min(masks, key=lambda one: masks[one].used)
            del masks[least]
        self._masks = masks
