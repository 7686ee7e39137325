"""Contents of torch's parameter groups: parameters, entries of state, options."""

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import Any, NamedTuple

from torch import Tensor

from functional_optim.core.named_tuples import from_fields
from functional_optim.core.overrides import HYPERS, LeafChain
from functional_optim.core.state import LeafState
from functional_optim.core.state_init import StateFields
from functional_optim.native import LOOPS

_PARAMS = attrgetter("params")

Entries = MutableMapping[Tensor, dict[str, Any]]
"""torch's dicts of state, by parameter."""

Gradients = Callable[[list[Tensor]], list[Tensor | None]]
"""Function of parameters that returns for each its gradient or None."""


class Group(NamedTuple):
    """Parameter group in one step."""

    hypers: tuple[Any, ...]
    params: Sequence[Tensor]
    names: Sequence[str] | None
    number: int

    def labels(self) -> Sequence[str]:
        """Return the name of each parameter for errors."""
        if not self.names:
            return [f"param_groups[{self.number}][{k}]" for k in range(len(self.params))]
        if len(self.names) != len(self.params):
            raise ValueError(
                f"param_groups[{self.number}] has {len(self.params)} parameters under 'params', "
                f"and {len(self.names)} names under 'param_names'; after a change of 'params', "
                "change 'param_names' in the same places, or add parameters by add_param_group"
            )
        return self.names


new_group = from_fields(Group)

StatesOf = Callable[[Group, Sequence[Tensor], Sequence[str], Iterable[bool]], list[LeafState]]
"""Function of parameters of a group, their names, and if each may make its first step, that returns
their checked states."""


class GroupTensors(NamedTuple):
    """Parameters and entries of state of groups in one step."""

    sizes: list[int]
    """The number of parameters of each group."""
    keys: list[str | None]
    """The keys of all entries of state, with None after the keys of each parameter."""
    params: list[Tensor]
    values: list[Any]
    """All entries. Some may not be tensors."""

    @property
    def tensors(self) -> list[Any]:
        """All parameters, and all entries."""
        return [*self.params, *self.values]

    @classmethod
    def of(cls, groups: Sequence[Group], state: Entries) -> "GroupTensors":
        """List the parameters and the entries of state of groups."""
        lists = list(map(_PARAMS, groups))
        params = list(chain.from_iterable(lists))
        loops, sizes = LOOPS.loaded, list(map(len, lists))
        found = None
        if loops is not None and isinstance(state, dict):
            found = loops.entries(state, params)
        if found is None:
            found = _entries_of(state, params)
        return _group_tensors((sizes, found[0], params, found[1]))


_group_tensors = from_fields(GroupTensors)


class GroupForm:
    """Everything in groups except the tensors: numbers of parameters, keys, and options."""

    def __init__(
        self, groups: Sequence[Group], chains: Sequence[LeafChain], held: GroupTensors
    ) -> None:
        self._sizes, self._keys = held.sizes, held.keys
        self._fields = [
            StateFields(
                chain.stages, one.hypers, {(param.shape, param.dtype) for param in one.params}
            )
            for chain, one in zip(chains, groups, strict=True)
        ]
        self._hypers = list(map(HYPERS, groups))
        """The hyper-parameters for which the state was checked."""

    def holds(self, held: GroupTensors, hypers: list[tuple[Any, ...]]) -> bool:
        """Return True if groups have this form."""
        if held.sizes != self._sizes or held.keys != self._keys:
            return False
        if not all(map(is_, hypers, self._hypers)):
            for k, own in enumerate(hypers):
                if own is not self._hypers[k] and not self._fields[k].is_valid_for(own):
                    return False
            self._hypers = hypers
        return True


def _entries_of(state: Entries, params: list[Tensor]) -> tuple[list[str | None], list[Any]]:
    """Return the keys in the dicts of parameters, with None after each dict, and all values."""
    if len(state) == len(params) and all(map(is_, state, params)):
        dicts = list(state.values())  # a lookup would call Tensor.__hash__, which is Python code
    else:
        dicts = [state.get(param, {}) for param in params]
    keys = chain.from_iterable(chain.from_iterable(zip(dicts, repeat((None,)))))
    return list(keys), list(chain.from_iterable(map(dict.values, dicts)))
