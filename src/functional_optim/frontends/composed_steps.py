"""The planned steps of parameter groups that have a chain each, or something in common."""

from collections.abc import Sequence
from operator import is_
from typing import Any

from functional_optim.core.leaf import PLAIN
from functional_optim.core.overrides import LeafChain
from functional_optim.frontends.group_plans import HYPERS, GroupForm, GroupTensors
from functional_optim.frontends.torch_flat import Group
from functional_optim.kernels import Executor
from functional_optim.optimizer import Optimizer
from functional_optim.plan.composed.addends import is_simple
from functional_optim.plan.composed.decider import Decider
from functional_optim.plan.composed.step_leaves import StepLeaf, StepLeaves
from functional_optim.plan.composed.steps import ComposedSteps
from functional_optim.plan.leaf_positions import rows_of

Parts = Sequence[tuple[Optimizer, tuple[int, ...]]]
"""Of each parameter group, its own optimizer and the places of its links."""


class GroupSteps:
    """The steps of the groups of a torch.optim front-end, as long as these keep their form.

    Args:
        parts: by the number of a group, its own optimizer and the places of its links.
        steps: of their parameters.
    """

    def __init__(self, parts: Parts, steps: ComposedSteps) -> None:
        self._parts, self.steps = parts, steps
        self._form: GroupForm | None = None
        self._chains: list[LeafChain] = []

    @classmethod
    def of(
        cls,
        groups: Sequence[Group],
        held: GroupTensors,
        parts: Parts,
        executor: Executor,
        leaves: Sequence[StepLeaf],
        masks: int,
    ) -> "GroupSteps | None":
        """Groups that were stepped; None where state does not stay the tensors that it is.

        Args:
            groups: as they are now, but those that are frozen.
            held: by the groups, after the step.
            parts: by the number of a group.
            executor: that made the step.
            leaves: of the step.
            masks: for how many sets of missing gradients steps are kept.
        """
        tensors = held.tensors
        if len(leaves) != len(held.params) or not is_simple(held.params):
            return None  # a parameter stands at two places, or is a DTensor, say
        rows = rows_of(leaves, tensors, range(len(tensors), len(tensors) + len(leaves)))
        if rows is None or not PLAIN.issuperset(type(tensors[k]) for row in rows for k in row.kept):
            return None
        numbers = [place for place, group in enumerate(groups) for _ in group.params]
        steps = ComposedSteps(executor, rows, numbers, masks=masks, owns_shared=True)
        return cls(parts, steps)

    def learn(
        self,
        groups: Sequence[Group],
        held: GroupTensors,
        leaves: StepLeaves,
        decided: Decider,
    ) -> None:
        """Plan the steps after one that was made of these leaves.

        Args:
            groups, held: as for :meth:`of`.
            leaves: of the step.
            decided: what it did.
        """
        stages = [self._parts[group.number][0].stages for group in groups]
        self._form = GroupForm(groups, held, stages.__getitem__)
        self.steps.learn(held.tensors, leaves, decided)

    def holds(self, groups: Sequence[Group], held: GroupTensors) -> bool:
        """Return True if groups hold what they did, but for the tensors."""
        form = self._form
        return form is not None and form.holds(held, list(map(HYPERS, groups)))

    def chains(self, groups: Sequence[Group]) -> list[LeafChain]:
        """Return the chain of each group; the same objects while hyper-parameters are."""
        now: list[Any] = list(map(HYPERS, groups))
        if not self._chains or not all(map(is_, now, map(HYPERS, self._chains))):
            self._chains = []
            for group in groups:
                own, places = self._parts[group.number]
                self._chains.append(LeafChain(places, own.stages, group.hypers))
        return self._chains
