"""StepBucket: tensors of parameter groups that are stepped together, with their plans."""

from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

from torch import Tensor

from functional_optim.frontends.group_chains import GroupChains
from functional_optim.frontends.group_steps import CurrentGroups, GroupSteps
from functional_optim.frontends.group_tensors import Entries, Gradients, Group, StatesOf


class BucketMember(NamedTuple):
    """Tensors of one parameter group in a bucket."""

    number: int
    """The number of the group."""
    params: Sequence[Tensor]
    names: Sequence[str] | None


class _Unit(NamedTuple):
    """Members with one executor."""

    places: list[int]
    chains: GroupChains
    """The chains of all groups, with the hyper-parameters of the last step of this unit."""
    steps: GroupSteps


class StepBucket:
    """Tensors of parameter groups that are stepped together, with their plans."""

    def __init__(
        self,
        members: Sequence[BucketMember] | None,
        chains: GroupChains,
        executors: Sequence[str],
        masks: int,
    ) -> None:
        self._members = members
        found: dict[str, _Unit] = {}
        for place, executor in enumerate(executors):
            if executor not in found:
                found[executor] = _Unit([], copy(chains), GroupSteps(executor, masks=masks))
            found[executor].places.append(place)
        self._units = list(found.values())

    def groups(self, every: Sequence[Group]) -> Sequence[Group]:
        """Return the members as groups, from all groups with their current hyper-parameters."""
        if self._members is None:
            return every
        return [Group(every[one.number].hypers, *one[1:], one.number) for one in self._members]

    def current(
        self, groups: Sequence[Group], states: Entries, states_of: StatesOf, gradients: Gradients
    ) -> list[tuple[GroupSteps, CurrentGroups]]:
        """Return the steps of the members of each executor, and what they step now."""
        own, found = self.groups(groups), []
        for unit in self._units:
            some = own if len(self._units) == 1 else [own[k] for k in unit.places]
            now = unit.chains.current_groups(some, states, states_of, gradients)
            found.append((unit.steps, now))
        return found
