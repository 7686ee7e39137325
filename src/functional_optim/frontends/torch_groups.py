"""Options in torch's parameter groups, and their translation to hyper-parameters of stages."""

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.checks import check_param, check_writable
from functional_optim.core.closure_optimizer import refuse_closure
from functional_optim.core.format import closest_name, format_value
from functional_optim.core.hyper import copy_tensors
from functional_optim.core.leaf import layouts_of
from functional_optim.core.links import (
    suggest_call,
)
from functional_optim.core.local_shards import check_takes_dtensor
from functional_optim.core.stage import Stage
from functional_optim.frontends.torch_arguments import EXECUTION_OPTIONS
from functional_optim.frontends.torch_checkpoint import DECOUPLED
from functional_optim.frontends.torch_schedule import is_scheduled
from functional_optim.optimizer import Optimizer

MAXIMIZE_OPTION = "maximize"
"""The option of torch's classes, and of the stage ``maximized``, that negates gradients."""

NOT_OPTIONS = ("params", "param_names")
"""The entries of a parameter group that are no options."""

FROZEN_OPTIONS = {"lr": 0.0, "weight_decay": 0.0}
"""Options of a group of frozen parameters: schedulers and loggers expect them in every group."""


def require_optimizer(given: Any) -> Optimizer:
    """Return the value if it is an Optimizer, else raise TypeError with a suggestion."""
    refuse_closure(given, "a subclass of TorchOptimizer")
    if not isinstance(given, Optimizer):
        way = suggest_call(given)
        raise TypeError(
            "optimizer must be a functional_optim.Optimizer, such as adamw(lr=1e-3), got "
            f"{format_value(given)}{f': {way}' if way else ''}"
        )
    return given


def require_params(given: Any) -> None:
    """Raise TypeError for a module or a dict in place of its parameters, with what to write."""
    nn = torch.nn
    of_modules = isinstance(given, (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterDict))
    if of_modules or (isinstance(given, nn.Module) and not isinstance(given, Iterable)):
        raise TypeError(
            f"params must be parameters, got the module {type(given).__name__}: write "
            "module.named_parameters(), or module.parameters() for parameters without names"
        )
    if isinstance(given, Mapping) and any(isinstance(key, str) for key in given):
        way = "[group] for one group" if "params" in given else "params.items() for all its items"
        raise TypeError(f"params must be parameters, got a {type(given).__name__}: write {way}")


BESIDE_OPTIONS = frozenset(
    {
        *NOT_OPTIONS,
        *EXECUTION_OPTIONS,
        DECOUPLED,  # require_same_decay checks its value
        "name",
        "step",
        # Entries of torch's schedulers.
        "base_momentum",
        "initial_lr",
        "max_lr",
        "max_momentum",
        "min_lr",
        "swa_lr",
        "shared_step",  # of shared scalars, as are entries such as "prodigy.shared.d"
    }
)
"""Entries of parameter groups that are allowed, and are no hyper-parameters."""


def require_options(group: Mapping[str, Any], names: Collection[str]) -> None:
    """Raise TypeError if a parameter group has an option that the optimizer does not have.

    The error names the option, and the hyper-parameter with the nearest name.
    """
    for key in group:
        is_known = key in names or key in BESIDE_OPTIONS or ".shared" in key
        if is_known or any(name.endswith(f".{key}") for name in names):
            continue
        there = sorted(names)
        near = closest_name(str(key), there)
        raise TypeError(
            f"a parameter group has the option {key!r}, which this optimizer does not have; "
            f"did you mean {near!r}? It has {', '.join(there)}. An entry of your own, which is "
            "no option, can be written into param_groups after construction"
            if near
            else f"a parameter group has the option {key!r}, and this optimizer has none"
        )


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group without its parameters and their names."""
    return {key: value for key, value in group.items() if key not in NOT_OPTIONS}


def missing_flags(loaded: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, bool]:
    """Return False for each flag that a loaded group lacks.

    In torch.optim, a class without a flag behaves as if the flag were False. A flag other than
    ``maximize`` that is True in the optimizer is left out.
    """
    return {
        name: False
        for name, value in own.items()
        if name not in loaded and isinstance(value, bool) and (is_maximize(name) or not value)
    }


def is_maximize(name: str) -> bool:
    """Return True if an option is named ``maximize``, or ``stage.maximize``."""
    return name.rpartition(".")[2] == MAXIMIZE_OPTION


def loaded_groups(
    loaded: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the groups of a checkpoint, with the schedules and flags that they lack.

    Folders of ``torch.distributed.checkpoint`` have no schedules. It loads into the state dict of
    the optimizer, and first replaces a function in a tuple by None.
    """
    own = [*groups, *([{}] * (len(loaded) - len(groups)))]  # torch refuses another number of groups
    made = []
    for number, (one, group) in enumerate(zip(loaded, own, strict=False)):
        if one.get(MAXIMIZE_OPTION) is True and not any(map(is_maximize, group)) and group:
            raise ValueError(
                "this checkpoint has maximize=True, which this optimizer does not have; put "
                "functional_optim.maximized() into the chain"
            )
        schedules = {k: own for k, own in group.items() if k != "params" and is_scheduled(own)}
        given = {k: own for k, own in one.items() if k not in schedules or _is_set(own)}
        made.append({**missing_flags(one, group), **schedules, **given})
        warn_of_replaced_schedules(number, group, made[-1])
    return made


def warn_of_replaced_schedules(
    number: int, group: Mapping[str, Any], loaded: Mapping[str, Any]
) -> None:
    """Warn if numbers of a checkpoint replace schedules in a group, which has this index."""
    for name, value in group.items():
        if name != "params" and is_scheduled(value) and not is_scheduled(loaded.get(name)):
            warnings.warn(
                f"param_groups[{number}][{name!r}] is a schedule, and the checkpoint has "
                f"{format_value(loaded.get(name))} there, which replaces it. To continue with the "
                "schedule, set the option to it again after loading",
                UserWarning,
                stacklevel=2,
            )


def _is_set(value: Any) -> bool:
    return not (isinstance(value, tuple) and None in value)


def params_of_groups(groups: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the parameters of parameter groups, group by group."""
    return [param for group in groups for param in group["params"]]


def copy_option_tensors(group: dict[str, Any]) -> None:
    """Copy the tensors among a group's options, so that no other group or optimizer shares them.

    Learning-rate schedulers write to a tensor ``lr`` in place.
    """
    group.update(copy_tensors(options_of(group)))


def with_checked_params(group: Mapping[str, Any], stages: Sequence[Stage]) -> dict[str, Any]:
    """Return a group with its parameters in a list, after checking them."""
    given = group["params"]
    if not isinstance(given, (Tensor, set)):
        given = list(given)  # an iterator can be read only once
    every = enumerate([given] if isinstance(given, Tensor) else given)
    pairs = [one if isinstance(one, tuple) else (f"params[{place}]", one) for place, one in every]
    for place in dict.fromkeys(layouts_of([param for _, param in pairs])):
        name, param = pairs[place]
        if isinstance(param, Tensor):
            check_param(param, str(name))
            check_writable({str(name): param})
            check_takes_dtensor(stages, param, str(name))
    return {**group, "params": given}


def remove_groups(
    optimizer: torch.optim.Optimizer, count: int, by_param: dict[Tensor, Any]
) -> None:
    """Remove all groups after the first ``count`` groups, with their state."""
    for group in optimizer.param_groups[count:]:
        for param in group["params"]:
            optimizer.state.pop(param, None)
            by_param.pop(param, None)
    del optimizer.param_groups[count:]


def check_group_order(
    groups: Sequence[Mapping[str, Any]],
    known: Sequence[Mapping[str, Any]],
    count: int,
    *,
    is_divided: bool,
) -> None:
    """Raise ValueError if groups were added to ``param_groups``, removed or reordered by hand.

    Without a division, all groups have one chain, so that groups may be removed and reordered.
    ``count`` groups were added by ``add_param_group``.
    """
    numbers = {id(group): number for number, group in enumerate(known)}
    moved = any(numbers.get(id(group), k) != k for k, group in enumerate(groups))
    if len(groups) > count or (is_divided and (len(groups) != count or moved)):
        raise ValueError(
            f"param_groups has {len(groups)} groups, and {count} were made by this optimizer, each "
            "with a chain of its own at its place; put them back in their order. Call "
            "add_param_group to add a group; to stop training one, set requires_grad_(False)"
            if is_divided
            else f"param_groups has {len(groups)} groups, and {count} were made by this optimizer; "
            "call add_param_group to add a group, since it creates the state"
        )


def common_options(
    groups: Sequence[Mapping[str, Any]], names: Sequence[Collection[str]]
) -> dict[str, Any]:
    """Return the hyper-parameters that all groups have, with the values of the first group.

    torch's schedulers read ``defaults`` to find options that every group has.
    """
    if not names:
        return {}
    first, *others = names
    return {name: groups[0][name] for name in first if all(name in own for own in others)}
