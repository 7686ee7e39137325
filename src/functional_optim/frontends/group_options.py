"""Readers of the options of parameter groups, which check changed options at each step."""

from collections.abc import Callable, Collection, Iterable, Mapping
from operator import is_
from typing import Any, NamedTuple, NoReturn, Protocol

from functional_optim.core.constructor_calls import prefix_links_error
from functional_optim.core.hyper import are_unchanged, is_fixed, replace_fields
from functional_optim.core.links import apply_changes, expand_changes, parse_changes
from functional_optim.core.stage import Link, Stage
from functional_optim.frontends.torch_checkpoint import DECOUPLED, require_same_decay
from functional_optim.frontends.torch_schedule import refuse_schedulers
from functional_optim.optimizer import Optimizer


class GroupChain(NamedTuple):
    """Chain that steps the parameters of a group."""

    stages: tuple[Stage, ...]
    hypers: tuple[Any, ...]
    """One Hyper per stage; the same object until an option changes."""
    executor: str

    @property
    def optimizer(self) -> Optimizer:
        """The chain as an optimizer."""
        return Optimizer(tuple(map(Link, self.stages, self.hypers)), self.executor)


class OptionsReader(Protocol):
    """Reader of the options of one parameter group."""

    @property
    def names(self) -> Collection[str]:
        """The options that the group must have."""

    @property
    def latest(self) -> GroupChain:
        """The chain of the options that were read last."""

    def chain(self, group: Mapping[str, Any]) -> GroupChain:
        """Return the chain of the group, with its current options."""

    def hypers(self, group: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the hyper-parameters of each stage: the same tuple until an option changes."""

    def checked_hypers(self, group: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the hyper-parameters of each stage, after checking all names and values."""


def refuse_missing(names: Iterable[str], group: Mapping[str, Any], number: int | None) -> NoReturn:
    """Raise ValueError: a parameter group lacks options that it had."""
    missing = [name for name in names if name not in group]
    raise ValueError(
        f"{'a parameter group' if number is None else f'parameter group {number}'} has no "
        f"{', '.join(missing)}; it had, so put it back"
    )


class ClassOptions:
    """Reader of the options of a parameter group that has the options of a class.

    An option may change the stages of the chain, as torch's ``amsgrad`` does.
    """

    def __init__(
        self,
        defaults: Mapping[str, Any],
        build: Callable[[Mapping[str, Any]], Optimizer],
        number: int | None = None,
    ) -> None:
        self.names = defaults.keys()
        self._build, self._number = build, number
        self._values: list[Any] | None = None
        self.latest = GroupChain((), (), "")

    def chain(self, group: Mapping[str, Any]) -> GroupChain:
        """Return the chain of the group, with its current options."""
        try:
            values = list(map(group.__getitem__, self.names))
        except KeyError:
            refuse_missing(self.names, group, self._number)
        refuse_schedulers(group)
        if self._values is None or not are_unchanged(self._values, values):
            made = self._build(group)
            stages = made.stages
            if self.latest.stages == stages:
                stages = self.latest.stages  # caches of compiled kernels compare by identity
            hypers = tuple(link.hyper for link in made.links)
            self._values, self.latest = values, GroupChain(stages, hypers, made.executor)
        if DECOUPLED in group and DECOUPLED not in self.names:
            require_same_decay(self.latest.stages, group)
        return self.latest

    def hypers(self, group: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the hyper-parameters of each stage: see :meth:`chain`."""
        return self.chain(group).hypers

    checked_hypers = hypers


class GroupOptions:
    """Reader of the options of a parameter group that has the hyper-parameters of a chain."""

    def __init__(self, own: Optimizer, number: int | None = None) -> None:
        self._own, self._number = own, number
        names = {name: name for name in own.hyper}
        self.names = names.keys()
        self._meant = expand_changes(own.links, parse_changes(own.links, names))
        self._size = 0
        """The number of entries of the group at the last read."""
        self._values: list[Any] = []
        self._are_fixed = False
        self._hypers: tuple[Any, ...] = ()

    @property
    def latest(self) -> GroupChain:
        """The chain of the options that were read last."""
        return GroupChain(self._own.stages, self._hypers, self._own.executor)

    def chain(self, group: Mapping[str, Any]) -> GroupChain:
        """Return the chain of the group, with its current options: see :meth:`hypers`."""
        self.hypers(group)
        return self.latest

    def hypers(self, group: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the hyper-parameters of each stage: the same tuple until an option changes."""
        if "initial_lr" in group:
            refuse_schedulers(group)
        if DECOUPLED in group:
            require_same_decay(self._own.stages, group)
        try:
            values = list(map(group.__getitem__, self.names))
        except KeyError:
            refuse_missing(self.names, group, self._number)
        same = self._are_fixed and len(group) == self._size
        if not (same and all(map(is_, values, self._values))):
            self._read(group, values)
        return self._hypers

    def checked_hypers(self, group: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the hyper-parameters of each stage, after checking all names and values."""
        self._check_names(group)
        require_same_decay(self._own.stages, group)
        self._read(group, [group[name] for name in self.names])
        return self._hypers

    def _read(self, group: Mapping[str, Any], values: list[Any]) -> None:
        """Update the hyper-parameters. If a value is refused, none is updated."""
        new = dict(zip(self.names, values, strict=True))
        if len(group) != self._size:
            self._check_names(group)
        if self._values:
            for name, before, now in zip(self.names, self._values, values, strict=True):
                if (before is now and self._are_fixed) or are_unchanged((before,), (now,)):
                    del new[name]
            if new:
                self._hypers = self._with(new)
        else:
            changes = [(*place, new[name]) for place, name in self._meant.items()]
            self._hypers = tuple([link.hyper for link in apply_changes(self._own.links, changes)])
        fixed = new.values() if self._are_fixed else values
        self._values, self._are_fixed = values, all(map(is_fixed, fixed))
        self._size = len(group)

    def _with(self, new: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the hyper-parameters with new values, after checking these values."""
        values: dict[int, dict[str, Any]] = {}
        for (place, field), name in self._meant.items():
            if name in new:
                values.setdefault(place, {})[field] = new[name]
        hypers = list(self._hypers)
        try:
            for place, own in values.items():
                stage = self._own.links[place].stage
                hypers[place] = replace_fields(
                    stage.name, stage.bounds, stage.check, hypers[place], own
                )
        except (TypeError, ValueError) as error:
            prefix_links_error(self._own.links, error)
            raise
        return tuple(hypers)

    def _check_names(self, group: Mapping[str, Any]) -> None:
        """Raise ValueError if an option is missing, or an option name is ambiguous."""
        names = self.names
        if not names <= group.keys():
            missing = ", ".join(name for name in names if name not in group)
            raise ValueError(
                f"a parameter group has no {missing}: it is of another optimizer than {self._own}"
            )
        for key in group.keys() - names:
            alike = [name for name in names if name.endswith(f".{key}")]
            if alike:
                raise ValueError(
                    f"several stages of this chain have a {key!r}; set {' or '.join(alike)}"
                )
