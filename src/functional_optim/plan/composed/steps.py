"""The steps of an optimizer of optimizers over leaves that stay the same tensors."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.core.links import Links
from functional_optim.core.overrides import LeafChain
from functional_optim.kernels import Executor, needs_total
from functional_optim.plan.composed import one_step
from functional_optim.plan.composed.decided import Decided, Summed
from functional_optim.plan.composed.plans import ComposedPlans, is_simple
from functional_optim.plan.composed.shared_numbers import Written
from functional_optim.plan.composed.step_leaves import Cohort, StepLeaf, StepLeaves
from functional_optim.plan.guard import LayoutGuard

MASKS = 8
"""For how many sets of missing gradients steps are kept, unless told otherwise."""


RUNS = 8
"""For how many runs, for each such set, plans are kept."""


class Prepared(NamedTuple):
    """A step of which nothing is refused any more."""

    runs: list[Callable[[], object]]
    """What makes each run."""
    numbers: list[Any]
    """The shared numbers of every link, after the step."""


class _Mask(NamedTuple):
    """The steps in which the same gradients are missing."""

    cohorts: list[tuple[int, tuple[tuple[int, ...], bool]]]
    """Of each the number of its chain, the leaves, and whether they have gradients."""
    alike: LayoutGuard | None
    """What the gradients that there are have to be like, where they are summed before they are
    looked at one by one."""
    summed: Summed | None
    """Sums them up as they lie; None where they are not laid out as their parameters."""


class ComposedSteps:
    """Keeps what is known of the steps of certain leaves, and makes them by kept plans.

    Args:
        executor: that steps the leaves.
        leaves: of all steps; parameters and state stay these tensors.
        chains: for each leaf the number of its chain.
        masks: for how many sets of missing gradients steps are kept.
        owns_shared: whether what belongs to no leaf is written to by steps, and by torch's
            operations alone: it is then read again only where these say so.
    """

    def __init__(
        self,
        executor: Executor,
        leaves: Sequence[StepLeaf],
        chains: Sequence[int],
        *,
        masks: int = MASKS,
        owns_shared: bool = False,
    ) -> None:
        self._leaves, self._chains = leaves, chains
        self._plans = ComposedPlans(executor, leaves, RUNS * masks)
        stages = {stage for leaf in leaves for stage in leaf.chain.stages}
        self._sums = any(map(needs_total, stages))
        self._masks: dict[bytes | None, _Mask] = {}
        self._most = masks
        self._written = Written() if owns_shared else None

    def prepared(
        self,
        links: Links,
        chains: Sequence[LeafChain],
        grads: list[Tensor | None],
        shared: Any,
        measured: Sequence[Tensor],
        extra: Mapping[str, Any],
    ) -> Prepared | None:
        """A step of which nothing is refused any more; None where it was not planned.

        Args:
            links: with the hyper-parameters of now.
            chains: by their numbers, with the same.
            grads: one for each leaf.
            shared: what belongs to no leaf.
            measured: totals that are known.
            extra: the inputs beside the gradients.

        Raises:
            FloatingPointError, TypeError, ValueError, RuntimeError: as for any step; nothing was
                changed.
        """
        known = self._masks.get(mask_of(grads))
        if known is None or not _is_alike(known.alike, grads):
            return None
        cohorts = [Cohort(chains[number], *own) for number, own in known.cohorts]
        if not self._plans.knows(cohorts):
            return None
        leaves, plans = StepLeaves(self._leaves, grads, cohorts), self._plans
        before = shared if self._written is None else self._written.before(shared)
        with torch.no_grad():
            decided = one_step.decide(
                links, plans.executor, leaves, before, measured, extra, known.summed
            )
        runs = plans.prepared(decided)
        return None if runs is None else Prepared(runs, decided.shared)

    def make(self, prepared: Prepared, shared: Any) -> None:
        """Make a step; ``shared`` is written to."""
        one_step.make(*prepared, shared)
        if self._written is not None:
            self._written.after(shared, prepared.numbers)

    def learn(self, leaves: StepLeaves, decided: Decided) -> None:
        """Plan the steps after one that was made of these leaves."""
        pairs = zip(leaves.leaves, leaves.grads, strict=True)
        both = [(leaf.param, grad) for leaf, grad in pairs if grad is not None]
        there = [grad for _, grad in both]
        if not is_simple(there):
            return
        if len(self._masks) >= self._most:
            self._masks.clear()
        cohorts = [
            (self._chains[one.members[0]], (one.members, one.has_gradients))
            for one in leaves.cohorts
        ]
        alike = LayoutGuard(there) if self._sums else None
        is_same = all(param.stride() == grad.stride() for param, grad in both)
        summed = self._plans.summed if is_same else None
        self._masks[mask_of(leaves.grads)] = _Mask(cohorts, alike, summed)
        self._plans.learn(decided)


def mask_of(gradients: Sequence[Any]) -> bytes | None:
    """Which gradients there are; None where none is missing."""
    if type(None) in map(type, gradients):
        return bytes([one is not None for one in gradients])
    return None


def _is_alike(alike: LayoutGuard | None, grads: list[Tensor | None]) -> bool:
    """Whether they are, if that is asked; not if one cannot be asked, such as a sparse one."""
    if alike is None:
        return True
    there: list[Any] = grads
    if type(None) in map(type, grads):
        there = [one for one in grads if one is not None]
    try:
        return alike(there)
    except RuntimeError:
        return False
