"""The planned steps of parameter groups that have a chain each, or something in common."""

from collections.abc import Sequence
from operator import is_

from functional_optim.core.overrides import LeafChain
from functional_optim.core.state import state_tensors
from functional_optim.frontends.group_plans import HYPERS, GroupTensors
from functional_optim.frontends.torch_flat import Entries, Group
from functional_optim.kernels import Executor
from functional_optim.optimizer import Optimizer
from functional_optim.plan.composed.addends import is_simple
from functional_optim.plan.composed.step_leaves import StepLeaf
from functional_optim.plan.composed.steps import ComposedSteps

Parts = Sequence[tuple[Optimizer, tuple[int, ...]]]
"""Of each parameter group, its own optimizer and the places of its links."""


class GroupSteps:
    """The steps of the groups of a torch.optim front-end, as long as these stay the same.

    Args:
        taken: their parameters and entries of state.
        parts: by the number of a group.
        steps: of their parameters.
    """

    def __init__(self, taken: GroupTensors, parts: Parts, steps: ComposedSteps) -> None:
        self.taken, self.steps = taken, steps
        self._parts = parts
        self._chains: list[LeafChain] = []

    @classmethod
    def of(
        cls,
        groups: Sequence[Group],
        states: Entries,
        parts: Parts,
        executor: Executor,
        leaves: Sequence[StepLeaf],
        masks: int,
    ) -> "GroupSteps | None":
        """Groups that were stepped; None where state does not stay the tensors that it is.

        Args:
            groups: as they are now, but those that are frozen.
            states: torch's dicts, after the step.
            parts: by the number of a group.
            executor: that made the step.
            leaves: of the step.
            masks: for how many sets of missing gradients steps are kept.
        """
        stages = [parts[group.number][0].stages for group in groups]
        taken = GroupTensors(groups, states, stages.__getitem__)
        held = []
        for leaf in leaves:
            held += [leaf.state.step, *state_tensors(leaf.state.stages)]
            held += [count for gate in leaf.state.gates for count in gate]
        if not taken.has(held) or not is_simple(taken.params):
            return None
        places: dict[int, int] = {}
        for place, group in enumerate(groups):
            for param in group.params:
                places.setdefault(id(param), place)
        chains = [places[id(leaf.param)] for leaf in leaves]
        steps = ComposedSteps(executor, leaves, chains, masks=masks, owns_shared=True)
        return cls(taken, parts, steps)

    def chains(self, groups: Sequence[Group]) -> list[LeafChain]:
        """Return the chain of each group; the same objects while hyper-parameters are."""
        now = list(map(HYPERS, groups))
        if not self._chains or not all(map(is_, now, map(HYPERS, self._chains))):
            self._chains = []
            for group in groups:
                own, places = self._parts[group.number]
                self._chains.append(LeafChain(places, own.stages, group.hypers))
        return self._chains
