"""torch's parameter groups: which of their entries are options, and what they mean for stages."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.brief import brief, nearest
from functional_optim.core.checks import check_param, check_writable
from functional_optim.core.closure_optimizer import refuse_closure
from functional_optim.core.hyper import are_unchanged, copy_tensors, is_fixed, replaced
from functional_optim.core.links import Links, apply, changes_of, meant, way_to_optimizer
from functional_optim.core.local_shards import check_takes_dtensor
from functional_optim.core.spelling import name_constructor_of
from functional_optim.core.stage import Stage
from functional_optim.frontends.torch_arguments import EXECUTION_OPTIONS
from functional_optim.frontends.torch_schedule import refuse_schedulers, with_schedules
from functional_optim.optimizer import Optimizer

MAXIMIZE_OPTION = "maximize"
"""The option of torch's classes, and of the stage, that negates gradients."""

NOT_OPTIONS = ("params", "param_names")
"""What a parameter group holds beside its options."""


FROZEN_OPTIONS = {"lr": 0.0, "weight_decay": 0.0}
"""The options of a group with frozen parameters: schedulers and loggers expect them in each group.
"""


def require_optimizer(given: Any) -> Optimizer:
    """Return the value, if it is an Optimizer.

    Raises:
        TypeError: the value is another one; the error says what to write instead.
    """
    refuse_closure(given, "a subclass of TorchOptimizer")
    if not isinstance(given, Optimizer):
        way = way_to_optimizer(given)
        raise TypeError(
            "optimizer must be a functional_optim.Optimizer, such as adamw(lr=1e-3), got "
            f"{brief(given)}{f': {way}' if way else ''}"
        )
    return given


BESIDE_OPTIONS = frozenset(
    {
        *NOT_OPTIONS,
        *EXECUTION_OPTIONS,
        "decoupled_weight_decay",
        "name",
        "step",
        # Entries of torch's schedulers.
        "base_momentum",
        "initial_lr",
        "max_lr",
        "max_momentum",
        "min_lr",
        "swa_lr",
        "shared_step",  # with entries such as "prodigy.shared.d", of what belongs to no parameter
    }
)
"""Entries of parameter groups that are no hyper-parameters, and are taken."""


def require_options(group: Mapping[str, Any], names: Collection[str]) -> None:
    """Refuse a parameter group with an option that the optimizer does not have.

    Args:
        group: as the caller wrote it.
        names: of the hyper-parameters.

    Raises:
        TypeError: names the option, and the hyper-parameter with the nearest name.
    """
    for key in group:
        is_known = key in names or key in BESIDE_OPTIONS or ".shared" in key
        if is_known or any(name.endswith(f".{key}") for name in names):
            continue
        there = sorted(names)
        near = nearest(str(key), there)
        raise TypeError(
            f"a parameter group has the option {key!r}, which this optimizer does not have; "
            f"did you mean {near!r}? It has {', '.join(there)}. An entry of your own, which is "
            "no option, can be written into param_groups after construction"
            if near
            else f"a parameter group has the option {key!r}, and this optimizer has none"
        )


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Everything of a parameter group but its parameters.

    Example::

        >>> options_of({"params": [], "param_names": [], "lr": 0.1})
        {'lr': 0.1}
    """
    return {key: value for key, value in group.items() if key not in NOT_OPTIONS}


def neutral_flags(loaded: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, bool]:
    """Return the value of each flag that a loaded group lacks: False, which is neutral.

    A class without a flag, or an older version of a class, does what the flag turned off means, as
    torch.optim takes it. A flag other than ``maximize`` that is on in the optimizer gets no value.

    Args:
        loaded: a parameter group of a checkpoint.
        own: the parameter group of the optimizer.

    Example::

        >>> neutral_flags({"lr": 0.1}, {"lr": 0.2, "maximize": True, "amsgrad": False})
        {'maximize': False, 'amsgrad': False}
    """
    return {
        name: False
        for name, value in own.items()
        if name not in loaded and isinstance(value, bool) and (is_maximize(name) or not value)
    }


def is_maximize(name: str) -> bool:
    """Return True if an option of a group is ``maximize``, of whichever stage."""
    return name.rpartition(".")[2] == MAXIMIZE_OPTION


def loaded_groups(
    loaded: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return groups of a checkpoint with the schedules and flags that they lack.

    Args:
        loaded: the groups as they were saved.
        groups: those of the optimizer.

    Raises:
        ValueError: a group ascends, and the optimizer has no ``maximize``.
    """
    own = [*groups, *([{}] * (len(loaded) - len(groups)))]  # torch refuses another number of groups
    for one, group in zip(loaded, own, strict=False):
        if one.get(MAXIMIZE_OPTION) is True and not any(map(is_maximize, group)) and group:
            raise ValueError(
                "this checkpoint has maximize=True, which this optimizer does not have; put "
                "functional_optim.maximized() into the chain"
            )
    return [
        {**neutral_flags(one, group), **one}
        for one, group in zip(with_schedules(loaded, groups), own, strict=False)
    ]


def check_given(given: Iterable[Any], stages: Sequence[Stage]) -> None:
    """Make sure that the parameters of a group can be stepped, before torch takes them.

    Args:
        given: parameters, or pairs of a name and a parameter; of anything else torch makes an
            error.
        stages: of the chain that is to step all of them; none where it is not known yet.

    Raises:
        ValueError: names the parameter, and what is wrong with it.
    """
    for place, one in enumerate(given):
        name, param = one if isinstance(one, tuple) else (f"params[{place}]", one)
        if isinstance(param, Tensor):
            check_param(param, str(name))
            check_writable({str(name): param})
            check_takes_dtensor(stages, param, str(name))


def params_of_groups(groups: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the parameters of parameter groups, group by group."""
    return [param for group in groups for param in group["params"]]


def links_of(own: Optimizer, names: Sequence[str], group: Mapping[str, Any]) -> Links:
    """The links of a group's chain, by the options in the group.

    Args:
        own: the chain.
        names: of its hyper-parameters.
        group: with a value for each.

    Raises:
        TypeError, ValueError: a value out of bounds; one that is missing, or not told apart.
    """
    return GroupOptions(own, names).links(group)


def own_options(group: dict[str, Any]) -> None:
    """Copy the tensors among a group's options, so that no other group or optimizer has them.

    Learning-rate schedulers write into a tensor lr.
    """
    group.update(copy_tensors(options_of(group)))


def with_checked_params(group: Mapping[str, Any], stages: Sequence[Stage]) -> dict[str, Any]:
    """Return a new group with its parameters in a list, if they may be stepped.

    Args:
        group: as the caller wrote it.
        stages: of the chain; none if its parameters have several.

    Raises:
        TypeError, ValueError: as of :func:`check_given`.
    """
    given = group["params"]
    if not isinstance(given, (Tensor, set)):
        given = list(given)  # an iterator serves for one look only
    check_given([given] if isinstance(given, Tensor) else given, stages)
    return {**group, "params": given}


def remove_groups(optimizer: torch.optim.Optimizer, count: int, *by_number: dict[int, Any]) -> None:
    """Remove the groups after the first ones, with their state.

    Args:
        optimizer: of the groups.
        count: number of groups that stay.
        by_number: what else is known of groups, by their number.
    """
    for known in by_number:
        for number in [one for one in known if one >= count]:
            del known[number]
    for group in optimizer.param_groups[count:]:
        for param in group["params"]:
            optimizer.state.pop(param, None)
    del optimizer.param_groups[count:]


def common_options(
    groups: Sequence[Mapping[str, Any]], names: Sequence[Collection[str]]
) -> dict[str, Any]:
    """Return the hyper-parameters that all groups have, with the values of the first group.

    Schedulers of torch look into ``defaults`` for what they may cycle in every group.

    Args:
        groups: the parameter groups.
        names: of the hyper-parameters of each group.
    """
    if not names:
        return {}
    first, *others = names
    return {name: groups[0][name] for name in first if all(name in own for own in others)}


def check_group(
    own: Optimizer,
    names: Sequence[str],
    defaults: Mapping[str, Any],
    group: Mapping[str, Any],
) -> None:
    """Make sure that the options of a new group make a chain.

    Args:
        own: the chain.
        names: of its hyper-parameters.
        defaults: the values of options that the group lacks.
        group: as the caller wrote it.

    Raises:
        TypeError, ValueError: as of :func:`require_options` and :func:`links_of`.
    """
    require_options(group, names)
    links_of(own, names, {**defaults, **group})


class GroupOptions:
    """The options in a parameter group, read at each step; those that have changed are checked.

    Args:
        own: the chain.
        names: of its hyper-parameters.
    """

    def __init__(self, own: Optimizer, names: Sequence[str]) -> None:
        self._own = own
        self._names = dict.fromkeys(names).keys()
        self._meant = meant(own.links, changes_of(own.links, {name: name for name in names}))
        self._size = 0  # of the group that was read last
        self._values: list[Any] = []
        self._are_fixed = False
        self._hypers: tuple[Any, ...] = ()

    def hypers(self, group: Mapping[str, Any]) -> tuple[Any, ...]:
        """The hyper-parameters of each stage: one object as long as no option has changed.

        Raises:
            KeyError: one is missing, as torch's classes say it.
            TypeError, ValueError: as of :func:`links_of`; a scheduler of torch for a schedule.
        """
        if "initial_lr" in group:
            refuse_schedulers(group)
        values = list(map(group.__getitem__, self._names))
        same = self._are_fixed and len(group) == self._size
        if not (same and all(map(is_, values, self._values))):
            self._read(group, values)
        return self._hypers

    def links(self, group: Mapping[str, Any]) -> Links:
        """The links of the chain, as :func:`links_of` gives them."""
        self._check_names(group)
        self._read(group, [group[name] for name in self._names])
        pairs = zip(self._own.links, self._hypers, strict=True)
        return tuple([link._replace(hyper=hyper) for link, hyper in pairs])

    def _read(self, group: Mapping[str, Any], values: list[Any]) -> None:
        """Take over what has changed; where it is refused, nothing is taken over."""
        new = dict(zip(self._names, values, strict=True))
        if len(group) != self._size:
            self._check_names(group)
        if self._values:
            for name, before, now in zip(self._names, self._values, values, strict=True):
                if (before is now and self._are_fixed) or are_unchanged((before,), (now,)):
                    del new[name]
            if new:
                self._hypers = self._with(new)
        else:
            changes = [(*place, new[name]) for place, name in self._meant.items()]
            self._hypers = tuple([link.hyper for link in apply(self._own.links, changes)])
        fixed = new.values() if self._are_fixed else values
        self._values, self._are_fixed = values, all(map(is_fixed, fixed))
        self._size = len(group)

    def _with(self, new: Mapping[str, Any]) -> tuple[Any, ...]:
        """The hyper-parameters with other values; only these are checked."""
        values: dict[int, dict[str, Any]] = {}
        for (place, field), name in self._meant.items():
            if name in new:
                values.setdefault(place, {})[field] = new[name]
        hypers = list(self._hypers)
        try:
            for place, own in values.items():
                stage = self._own.links[place].stage
                hypers[place] = replaced(stage.name, stage.bounds, stage.check, hypers[place], own)
        except (TypeError, ValueError) as error:
            name_constructor_of(self._own.links, error)
            raise
        return tuple(hypers)

    def _check_names(self, group: Mapping[str, Any]) -> None:
        """A group has every option, and none whose name stands for several."""
        names = self._names
        if not names <= group.keys():
            missing = ", ".join(name for name in names if name not in group)
            raise ValueError(
                f"a parameter group has no {missing}: it is of another optimizer than {self._own}"
            )
        for key in group.keys() - names:
            alike = [name for name in names if name.endswith(f".{key}")]
            if alike:
                raise ValueError(
                    f"{key!r} stands in several stages of this chain; set {' or '.join(alike)}"
                )
