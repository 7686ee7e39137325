"""What a step hook steps in torch's form: parameter groups, and state dicts that torch.optim reads.

Parameters that have the same hyper-parameters are a group. An optimizer without overrides has one,
with all parameters in it.
"""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn, Protocol

from torch import Tensor

from functional_optim import LeafState, Optimizer, TorchOptimizer
from functional_optim.core.links import values, with_values
from functional_optim.core.stage import Link
from functional_optim.core.torch_state import from_entries, to_entries
from functional_optim.core.tree import Path
from functional_optim.frontends.torch_entries import write_checkpoint
from functional_optim.frontends.torch_groups import NOT_OPTIONS, options_of
from functional_optim.frontends.torch_schedule import GroupSchedule, guard_schedules


class Group(NamedTuple):
    """Parameters with the same hyper-parameters."""

    params: dict[str, Tensor]
    """By name."""
    hypers: tuple[Any, ...]
    """One Hyper per stage."""
    beside: dict[str, Any]
    """What others keep in the group: the class of a checkpoint its own options, say."""


class Grouped(Protocol):
    """What has parameter groups."""

    @property
    def groups(self) -> list[Group]:
        """As they are now."""

    @property
    def optimizer(self) -> Optimizer:
        """With the hyper-parameters of all of them."""

    def use(self, optimizer: Optimizer) -> None:
        """Step by other hyper-parameters from now on."""


class ParamGroup(MutableMapping[str, Any]):
    """A parameter group in torch's form, to be read and written like a dict.

    What is written is checked at once, and holds from the next backward pass on.

    Args:
        owner: what has the group.
        number: of the group.

    Raises:
        KeyError: a name that the group does not have.
        TypeError: its parameters, or a hyper-parameter, are to go; a value of a wrong type.
        ValueError: a value out of bounds, or an option that the state was not made for.
    """

    def __init__(self, owner: Grouped, number: int) -> None:
        self._owner, self._number = owner, number

    def __getitem__(self, key: str) -> Any:
        return self._now()[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if key in NOT_OPTIONS:
            self._refuse(key)
        groups = self._owner.groups
        if key in self._owner.optimizer.hyper:
            wanted = [{key: value} if k == self._number else {} for k in range(len(groups))]
            self._owner.use(with_group_values(self._owner.optimizer, groups, wanted))
        else:
            groups[self._number].beside[key] = value

    def __delitem__(self, key: str) -> None:
        own = self._owner.groups[self._number].beside
        if key not in own and key in self._now():
            self._refuse(key)
        del own[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())

    def __repr__(self) -> str:
        return repr(self._now())

    def _now(self) -> dict[str, Any]:
        group = self._owner.groups[self._number]
        named = {"params": list(group.params.values()), "param_names": list(group.params)}
        return {**values_of(self._owner.optimizer, group), **group.beside, **named}

    def _refuse(self, key: str) -> NoReturn:
        raise TypeError(
            f"{key} of parameter group {self._number} cannot be replaced or removed: a step hook "
            "steps the parameters, and has the hyper-parameters, that it was made with; make "
            "another OptimizerState, and load the state_dict() of this one into it"
        )


class _Named:
    """The parameters that an override is meant for, by their names."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)

    def __call__(self, path: Path) -> bool:
        return path[0] in self._names


def values_of(optimizer: Optimizer, group: Group) -> dict[str, Any]:
    """The hyper-parameters of a group, by name."""
    return values(tuple(map(Link, optimizer.stages, group.hypers)))


def with_group_values(
    optimizer: Optimizer, groups: Sequence[Group], wanted: Sequence[Mapping[str, Any]]
) -> Optimizer:
    """An optimizer with other hyper-parameters for groups.

    What all groups agree on is the chain's, as by ``replace``; anything else is an override.

    Args:
        optimizer: as it is now.
        groups: all of them.
        wanted: for each, hyper-parameters by name; what is left out stays.

    Raises:
        TypeError, ValueError: a name that the chain does not have; a value out of bounds.
    """
    now = [values_of(optimizer, group) for group in groups]
    changed = [
        {key: value for key, value in new.items() if key not in own or not _same(own[key], value)}
        for own, new in zip(now, wanted, strict=True)
    ]
    common = {
        key: value
        for key, value in changed[0].items()
        if all(key in one and _same(one[key], value) for one in changed)
    }
    made = optimizer.replace(**common)
    for group, own in zip(groups, changed, strict=True):
        # Of what is the chain's now, that which an override hides.
        there = values(tuple(map(Link, made.stages, made.hypers_at((next(iter(group.params)),)))))
        left = {key: value for key, value in own.items() if not _same(there.get(key), value)}
        if left:
            made = made.override(_Named(list(group.params)), **left)
    return made


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other
    return one is other or (type(one) is type(other) and bool(one == other))


def written(
    optimizer: Optimizer, groups: Sequence[Group], leaves: Mapping[str, LeafState]
) -> dict[str, Any]:
    """A state dict, as :class:`~functional_optim.TorchOptimizer` writes it.

    Args:
        optimizer: whose state it is.
        groups: all of them.
        leaves: the state of each parameter, by name; the dict holds its tensors.
    """
    stages = optimizer.stages
    state: list[dict[str, Any]] = []
    live, kept = [], []
    for group in groups:
        options = values_of(optimizer, group)
        numbers = list(range(len(state), len(state) + len(group.params)))
        for name, param in group.params.items():
            state.append(to_entries(stages, group.hypers, param, leaves[name]))
        one = {**options, **group.beside, "param_names": list(group.params)}
        guard_schedules(one, options)
        live.append({**one, "params": list(group.params.values())})
        kept.append({**one, "params": numbers})
    made = {"state": dict(enumerate(state)), "param_groups": kept}
    chains = [tuple(map(Link, stages, group.hypers)) for group in groups]
    write_checkpoint(chains, live, made)
    return made


class Read(NamedTuple):
    """What a state dict holds for parameters."""

    options: list[dict[str, Any]]
    """Of each group."""
    leaves: dict[str, LeafState]
    """The state of each parameter, by name, in memory of its own."""


def read(optimizer: Optimizer, groups: Sequence[Group], state_dict: Mapping[str, Any]) -> Read:
    """Read a state dict of this form, of TorchOptimizer, or of the equivalent torch.optim class.

    Raises:
        ValueError: other groups, or a state that does not fit the chain.
    """
    one_chain = replace(optimizer, overrides=())
    given = [
        {**values_of(optimizer, group), "params": list(group.params.items())} for group in groups
    ]
    made = TorchOptimizer(given, one_chain)
    made.load_state_dict(state_dict)
    options, leaves = [], {}
    for group, loaded in zip(groups, made.param_groups, strict=True):
        own = {key: value for key, value in loaded.items() if key in one_chain.hyper}
        hypers = tuple(link.hyper for link in with_values(one_chain.links, own))
        options.append({k: _unguarded(one) for k, one in options_of(loaded).items()})
        for name, param in group.params.items():
            leaves[name] = from_entries(optimizer.stages, hypers, param, made.state[param], name)
    return Read(options, leaves)


def _unguarded(value: Any) -> Any:
    """A schedule as the chain has it."""
    return value.schedule if isinstance(value, GroupSchedule) else value
