"""The planned steps of parameter groups that have a chain each, or something in common."""

from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.core.links import Links
from functional_optim.core.overrides import LeafChain
from functional_optim.core.state import state_tensors
from functional_optim.frontends.torch_flat import Entries, Group
from functional_optim.frontends.torch_plans import HYPERS, PLANS, mask_of
from functional_optim.frontends.torch_taken import Taken
from functional_optim.kernels import Executor
from functional_optim.optimizer import Optimizer
from functional_optim.plan import composed
from functional_optim.plan.composed_plans import ComposedPlans, is_simple
from functional_optim.plan.decided import Cohort, Decided, StepLeaf, StepLeaves
from functional_optim.plan.places import Alike

Parts = Sequence[tuple[Optimizer, tuple[int, ...]]]
"""Of each parameter group, its own optimizer and the places of its links."""

_Call = Callable[[], object]


class _Mask(NamedTuple):
    """The steps in which the same gradients are missing."""

    cohorts: list[tuple[int, tuple[int, ...], bool]]
    """Of each the group, the leaves, and whether they have gradients."""
    alike: Alike
    """What the gradients that there are have to be like."""


class ComposedSteps:
    """Keeps what is known of the groups of a torch.optim front-end, as long as they stay the same.

    Args:
        taken: their parameters and entries of state.
        parts: by the number of a group.
        executor: that steps them.
        leaves: each parameter once.
        groups: for each of these, the place of its group.
    """

    def __init__(
        self,
        taken: Taken,
        parts: Parts,
        executor: Executor,
        leaves: Sequence[StepLeaf],
        groups: Sequence[int],
    ) -> None:
        self._taken, self._parts, self._groups = taken, parts, groups
        self._leaves = leaves
        self._plans = ComposedPlans(executor, leaves)
        self._chains: list[LeafChain] = []
        self._masks: dict[bytes | None, _Mask] = {}

    @classmethod
    def of(
        cls,
        groups: Sequence[Group],
        states: Entries,
        parts: Parts,
        executor: Executor,
        leaves: Sequence[StepLeaf],
    ) -> "ComposedSteps | None":
        """Groups that were stepped; None where state does not stay the tensors that it is.

        Args:
            groups: as they are now, but those that are frozen.
            states: torch's dicts, after the step.
            parts: by the number of a group.
            executor: that made the step.
            leaves: of the step.
        """
        stages = [parts[group.number][0].stages for group in groups]
        taken = Taken(groups, states, stages.__getitem__)
        held = [
            one
            for leaf in leaves
            for one in (
                leaf.state.step,
                *state_tensors(leaf.state.stages),
                *(count for gate in leaf.state.gates for count in gate),
            )
        ]
        if not taken.has(held) or not is_simple(taken.params):
            return None
        places: dict[int, int] = {}
        for place, group in enumerate(groups):
            for param in group.params:
                places.setdefault(id(param), place)
        return cls(taken, parts, executor, leaves, [places[id(leaf.param)] for leaf in leaves])

    def holds(self, groups: Sequence[Group], states: Entries) -> bool:
        """Whether groups have these parameters, and these the same entries of state."""
        return self._taken.holds(groups, states)

    def prepared(
        self,
        links: Links,
        groups: Sequence[Group],
        gradients: Callable[[list[Tensor]], list[Tensor | None]],
        shared: Any,
        measured: Sequence[Tensor],
        extra: Mapping[str, Any],
    ) -> tuple[list[_Call], list[Any]] | None:
        """A step of groups that hold, of which nothing is refused any more.

        Args:
            links: with the hyper-parameters of now.
            groups: as they are now, but those that are frozen.
            gradients: gives the gradients of parameters.
            shared: what belongs to no leaf.
            measured: totals that are known.
            extra: the inputs beside the gradients.

        Returns:
            What makes each run, and the shared numbers after the step; None where it was not
            planned.
        """
        grads = gradients(self._taken.params)
        there: list[Any] = grads
        mask = mask_of(grads)
        if mask is not None:
            there = [one for one in grads if one is not None]
        known = self._masks.get(mask)
        if known is None or not is_alike(known.alike, there):
            return None
        chains = self._chains_of(groups)
        cohorts = [Cohort(chains[group], *own) for group, *own in known.cohorts]
        if not self._plans.knows(cohorts):
            return None
        leaves = StepLeaves(self._leaves, grads, cohorts)
        plans = self._plans
        with torch.no_grad():
            decided = composed.decide(
                links, plans.executor, leaves, shared, measured, extra, plans.summed
            )
        steps = plans.prepared(decided)
        return None if steps is None else (steps, decided.shared)

    def learn(self, leaves: StepLeaves, decided: Decided) -> None:
        """Plan the steps after one that was made of these leaves."""
        there = [one for one in leaves.grads if one is not None]
        if not is_simple(there):
            return
        if len(self._masks) >= PLANS:
            self._masks.clear()
        cohorts = [
            (self._groups[one.members[0]], one.members, one.has_gradients) for one in leaves.cohorts
        ]
        self._masks[mask_of(leaves.grads)] = _Mask(cohorts, Alike(there))
        self._plans.learn(decided)

    def _chains_of(self, groups: Sequence[Group]) -> list[LeafChain]:
        """Of each group; the same objects as long as the hyper-parameters are."""
        now = list(map(HYPERS, groups))
        if not all(map(is_, now, map(HYPERS, self._chains))) or not self._chains:
            self._chains = []
            for group in groups:
                own, places = self._parts[group.number]
                self._chains.append(LeafChain(places, own.stages, group.hypers))
        return self._chains


def is_alike(alike: Alike, tensors: list[Tensor]) -> bool:
    """Whether they are; not if one cannot be asked, such as a sparse one."""
    try:
        return alike(tensors)
    except RuntimeError:
        return False
