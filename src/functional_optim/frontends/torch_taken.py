"""Check that torch-like parameter groups still have their parameters and entries of state."""

from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch import Tensor

from functional_optim.core.initial import StateFields
from functional_optim.core.stage import Stage
from functional_optim.frontends.torch_flat import Entries, Group

_PARAMS = attrgetter("params")  # no frame for each step
_HYPERS = attrgetter("hypers")


class TakenGroups:
    """The parameters and entries of state of some groups, for which plans hold.

    Args:
        groups: as they are now.
        state: torch's dicts.
        stages_of: gives the stages of a group by its place among these.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        state: Entries,
        stages_of: Callable[[int], Sequence[Stage]],
    ) -> None:
        self._sizes = [len(group.params) for group in groups]
        self._given = [param for group in groups for param in group.params]
        self.params = list({id(param): param for param in self._given}.values())
        """Each once."""
        self._entries = values_of(state, self.params)
        self.hypers = [group.hypers for group in groups]
        """Of each group, those for which the state was checked."""
        self._forms = [
            StateFields(stages_of(number), group.hypers, group.kinds())
            for number, group in enumerate(groups)
        ]

    def holds(self, groups: Sequence[Group], state: Entries) -> bool:
        """Return True if groups have these parameters, and these the same entries of state."""
        lists = list(map(_PARAMS, groups))
        if list(map(len, lists)) != self._sizes:
            return False
        if not all(map(is_, chain.from_iterable(lists), self._given)):
            return False
        entries = values_of(state, self.params)
        if len(entries) != len(self._entries) or not all(map(is_, entries, self._entries)):
            return False
        return all(map(is_, map(_HYPERS, groups), self.hypers)) or self._forms_hold(groups)

    def has(self, tensors: Sequence[Tensor]) -> bool:
        """Return True if all of these tensors are entries, so that they stay from step to step."""
        held = {id(value) for value in self._entries}
        return all(id(one) in held for one in tensors)

    def _forms_hold(self, groups: Sequence[Group]) -> bool:
        """Return True if hyper-parameters ask for the state that there is."""
        for number, group in enumerate(groups):
            if group.hypers is not self.hypers[number]:
                if not self._forms[number].hold(group.hypers):
                    return False
                self.hypers[number] = group.hypers
        return True


def values_of(state: Entries, params: Sequence[Tensor]) -> list[Any]:
    """All that the dicts of these parameters hold, one after the other."""
    if len(state) == len(params) and all(map(is_, state, params)):
        dicts: Any = state.values()  # a tensor's hash is Python's, one call for each
    else:
        dicts = [state.get(param, {}) for param in params]
    return list(chain.from_iterable(map(dict.values, dicts)))
