"""Conversion from and to live torch.optim optimizers and their state dicts."""

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import optree
import torch
from torch import Tensor

from functional_optim.core.chain import require_one_chain
from functional_optim.core.checks import check_leaf_state
from functional_optim.core.closure_optimizer import ClosureOptimizer
from functional_optim.core.hyper import hash_key
from functional_optim.core.links import hyper_values as links_values
from functional_optim.core.selectors import if_any
from functional_optim.core.stage import Link
from functional_optim.core.state import LeafState, State, map_state
from functional_optim.core.torch_state import from_entries, to_entries
from functional_optim.core.tree import Path, flatten, leaf_states, path_name
from functional_optim.frontends.closure_interop import closure_from_torch, closure_state_dict
from functional_optim.frontends.recipe import StateDictForm, form_of
from functional_optim.frontends.registry import (
    as_functional_optim,
    factory_of,
    functional_optim_map,
    has_equivalent,
)
from functional_optim.frontends.torch_arguments import (
    EXECUTION_OPTIONS,
    is_open,
    is_optimizer_class,
)
from functional_optim.frontends.torch_checkpoint import DECOUPLED, decouples, torch_step
from functional_optim.frontends.torch_schedule import is_scheduled
from functional_optim.optimizer import Optimizer
from functional_optim.storage.conversion import plain_entries


class FromTorch(NamedTuple):
    """Result of :func:`from_torch`."""

    optimizer: Optimizer
    params: tuple[dict[str, Tensor], ...]
    """One dict per parameter group, by name (or by running number): the live parameters."""
    state: State


def from_torch(instance: torch.optim.Optimizer) -> FromTorch:
    """Convert a live torch.optim optimizer to (optimizer, params, state).

    Args:
        instance: an optimizer of a registered class, before or after any number of steps.

    Returns:
        The optimizer, with the hyper-parameters of each group (for torch.optim.LBFGS, a
        :class:`~functional_optim.ClosureOptimizer`); the live parameters; and copies of their
        state. Its next step has the bits of the instance's next step. For complex parameters, the
        bits are those of torch on their real view.

    Raises:
        TypeError: the class stands for an optimizer with parts or shared scalars.
        ValueError: the class is not registered, groups need different chains, an option that the
            constructor lacks was changed, the state does not fit, or there is no step count. The
            step count may be in the state of each parameter, or in the groups, under "step".

    Example::

        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> live = torch.optim.AdamW([weight], lr=0.1)
        >>> weight.grad = torch.ones(2)
        >>> live.step()
        >>> optimizer, params, state = from_torch(live)
        >>> grads = [{"0": torch.ones(2)}]
        >>> new, state = optimizer.update(params, tuple(grads), state)
        >>> live.step()
        >>> torch.equal(new[0]["0"], weight)
        True
    """
    cls = type(instance)
    factory = factory_of(cls)
    optimizers = [
        factory(**_group_arguments(cls, instance.defaults, group))
        for group in instance.param_groups
    ]
    optimizer: Any = optimizers[0]
    for index, other in enumerate(optimizers[1:], start=1):
        if other.stages != optimizer.stages:
            raise ValueError(
                f"group {index} of this {cls.__name__} needs another chain than group 0 "
                f"({other} against {optimizer}); take the groups as two optimizers"
            )
        base = optimizer.hyper
        changed = {
            key: value
            for key, value in other.hyper.items()
            if hash_key(value) != hash_key(base[key])
        }
        if changed:
            # In torch, a group may have no parameters: the selector then matches no leaf.
            optimizer = optimizer.override(if_any((index,)), **changed)
    params = _named_groups(instance)
    if isinstance(optimizer, ClosureOptimizer):
        closure_state: Any = closure_from_torch(optimizer, params, instance)
        return FromTorch(cast("Any", optimizer), params, closure_state)
    require_one_chain(optimizer, "from_torch")
    states = []
    for index, group in enumerate(params):
        states.append(
            {
                name: _copy_state(optimizer, (index, name), param, instance)
                for name, param in group.items()
            }
        )
    return FromTorch(optimizer, params, State(tuple(states)))


def _group_arguments(
    cls: type, defaults: Mapping[str, Any], group: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options of a group that are arguments of the class, without EXECUTION_OPTIONS.

    If the class takes ``**kwargs``, return all options in its defaults: the factory checks them.
    """
    arguments = defaults if is_open(cls) else inspect.signature(cls).parameters
    fixed = [key for key in defaults if key not in {*arguments, *EXECUTION_OPTIONS, "step"}]
    for key in fixed:
        if key in group and hash_key(group[key]) != hash_key(defaults[key]):
            raise ValueError(
                f"a parameter group has {key}={group[key]!r}, but {cls.__name__} has no argument "
                f"{key!r}, so its functional equivalent always has {defaults[key]!r}: set it back, "
                "or register a class and a factory that take it"
            )
    return {
        # A copy: a scheduler of the instance may write to its tensor.
        key: value.clone() if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key in arguments and key != "params" and key not in EXECUTION_OPTIONS
    }


def _named_groups(instance: torch.optim.Optimizer) -> tuple[dict[str, Tensor], ...]:
    groups = []
    start = 0
    for group in instance.param_groups:
        names = group.get("param_names") or [str(start + i) for i in range(len(group["params"]))]
        named = dict(zip(names, group["params"], strict=True))
        if len(named) != len(names) or len({id(param) for param in named.values()}) != len(names):
            raise ValueError(
                "a parameter, or a name, is twice in one group of this optimizer; a parameter is "
                "stepped once, so give it once"
            )
        groups.append(named)
        start += len(names)
    return tuple(groups)


def _copy_state(
    optimizer: Optimizer, path: Path, param: Tensor, instance: torch.optim.Optimizer
) -> LeafState:
    state = from_entries(
        optimizer.stages,
        optimizer.hypers_at(path, tuple(param.shape)),
        param,
        instance.state.get(param, {}),
        path_name(path),
        group_step=instance.param_groups[path[0]].get("step"),
    )
    stages = tuple(map_state(lambda t: t.detach().clone(), one) for one in state.stages)
    return LeafState(state.step.clone(), stages)


def to_torch_state_dict(
    optimizer: Optimizer,
    params: Any,
    state: State,
    cls: type | None = None,
    *,
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a state dict that the equivalent torch.optim class loads.

    Parameters are numbered as in torch.optim: dicts in the order of insertion, so that
    ``dict(model.named_parameters())`` has the order of ``model.parameters()``. In a tuple (or list)
    of dicts, as :func:`from_torch` returns, each dict is one parameter group. Any other tree is one
    group.

    Args:
        optimizer: the optimizer, whose hyper-parameters are written to the groups. It may be a
            :class:`~functional_optim.ClosureOptimizer`.
        params: the tree of parameters.
        state: their state.
        cls: the class that will load the state dict. By default the class of torch.optim with this
            chain, or else the registered class.
        options: options of ``cls`` that are no hyper-parameters here
            (``{"weight_decay_type": "direct"}``), or that have other names there. They are added to
            each group. If names differ, the equivalent of ``cls`` with these options must be this
            chain.

    Returns:
        ``{"state": ..., "param_groups": ...}``. It has the tensors of ``state``, not copies, like
        torch's own ``state_dict()``. The state of a ``stored`` optimizer is decoded to float32.

    Raises:
        ValueError: no registered class has this chain; hyper-parameters differ inside a group; a
            hyper-parameter is a schedule, or is not an option of the class; an option of the class
            follows from no hyper-parameter; step counts differ inside a group of a class that has
            one count per group.

    Example::

        >>> from functional_optim import adamw
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = adamw(lr=0.1)
        >>> live = torch.optim.AdamW([weight])
        >>> state = optimizer.init([weight])
        >>> live.load_state_dict(to_torch_state_dict(optimizer, [weight], state))
        >>> live.param_groups[0]["lr"]
        0.1
    """
    if isinstance(optimizer, ClosureOptimizer):
        return closure_state_dict(optimizer, params, cast("Any", state), cls, options or {})
    require_one_chain(optimizer, "to_torch_state_dict")
    _refuse_schedules(optimizer)
    cls = torch_class_of(optimizer) if cls is None else cls
    arguments = inspect.signature(cls).parameters
    given = {**optimizer.hyper, **(options or {})}
    matrix = torch.zeros(1, 1, requires_grad=True)  # some classes need matrices
    probe: Any = cls([matrix], **{key: given[key] for key in given if key in arguments})
    form = form_of(probe)
    states = _states_by_path(optimizer, params, state)
    groups: list[dict[str, Any]] = []
    entries: dict[int, dict[str, Any]] = {}
    number = 0
    for index, paths in enumerate(_grouped_paths(optimizer, params)):
        shapes = {path: tuple(states[path][0].shape) for path in paths} or {(index,): ()}
        hypers = _common_hypers(optimizer, shapes)
        named = {**links_values(tuple(map(Link, optimizer.stages, hypers))), **(options or {})}
        if DECOUPLED in probe.defaults:  # here it follows from the stages
            named.setdefault(DECOUPLED, decouples(optimizer.stages))
        own = {key: named[key] for key in named if key in probe.defaults}
        # A registered factory may give other names to the options of its class.
        if not (options and has_equivalent(cls, own, optimizer.stages, hypers)):
            own = _known_options(cls, probe.defaults, named)
        groups.append({**probe.defaults, **own, "params": []})
        for path in paths:
            made = _torch_entries(optimizer, path, *states[path], form)
            if made:
                entries[number] = made
            groups[-1]["params"].append(number)
            number += 1
        if "step" in form.options:
            groups[-1]["step"] = _common_step([states[path][1] for path in paths])
    return {"state": entries, "param_groups": groups}


def torch_class_of(optimizer: Optimizer) -> type:
    """Return the registered class whose functional equivalent has this chain.

    Classes of torch.optim have priority over other classes.
    """
    found: list[Any] = [key for key in functional_optim_map if _has_chain(key, optimizer)]
    if not found and decouples(optimizer.stages):
        option = {DECOUPLED: True}
        found = [key for key in functional_optim_map if _has_chain(key, optimizer, **option)]
    found = [key for key in found if key.__module__.startswith("torch.optim")] or found
    if len(found) != 1:
        several = ", ".join(key.__name__ for key in found)
        what = f"the classes {several} have" if found else "no registered class has"
        raise ValueError(f"{what} the chain {optimizer}; pass cls=, the class that is to load it")
    only: type = found[0]
    return only


def _has_chain(key: Any, optimizer: Optimizer, **options: Any) -> bool:
    """Return True if a key of the registry, with these options, has the stages of an optimizer."""
    if not is_optimizer_class(key):
        return False
    try:
        made = as_functional_optim(key, **options)
        return isinstance(made, Optimizer) and made.stages == optimizer.stages
    except TypeError:  # an argument without a default, or an option that the class lacks
        return False


def _grouped_paths(optimizer: Optimizer, params: Any) -> list[list[Path]]:
    """Return the paths of tensors, group by group, with dicts in the order of insertion."""
    namespace = optimizer.namespace or "functional_optim"
    with optree.dict_insertion_ordered(True, namespace=namespace):
        paths: list[Path] = optree.tree_paths(params, namespace=namespace)
    if isinstance(params, (tuple, list)) and all(isinstance(group, dict) for group in params):
        return [[path for path in paths if path[0] == index] for index in range(len(params))]
    return [paths]


def _states_by_path(
    optimizer: Optimizer, params: Any, state: State
) -> dict[Path, tuple[Tensor, LeafState]]:
    """Return each parameter and its checked state, by path."""
    leaves, spec = flatten(params, optimizer.namespace)
    pairs = dict(zip(spec.paths(), zip(leaves, leaf_states(spec, state), strict=True), strict=True))
    for path, (param, one) in pairs.items():
        if param is not None:
            hypers = optimizer.hypers_at(path, tuple(param.shape))
            check_leaf_state(optimizer.stages, hypers, param, one, path_name(path))
    return pairs


def _common_hypers(optimizer: Optimizer, shapes: Mapping[Path, tuple[int, ...]]) -> tuple[Any, ...]:
    """Return the hyper-parameters of each stage, which all parameters of a group have."""
    found: list[tuple[Any, ...]] = []
    for path, shape in shapes.items():
        hypers = optimizer.hypers_at(path, shape)
        if hash_key(hypers) not in map(hash_key, found):
            found.append(hypers)
    if len(found) > 1:
        raise ValueError(
            "hyper-parameters differ inside one group of parameters; give params as a tuple of "
            "dicts, one for each of torch's parameter groups"
        )
    return found[0]


def _refuse_schedules(optimizer: Optimizer) -> None:
    changes = [change for _, changed in optimizer.overrides for change in changed]
    named = [*optimizer.hyper.items(), *((field, value) for _, field, value in changes)]
    for name, value in named:
        if is_scheduled(value):
            raise ValueError(f"{name} is a schedule; torch.optim keeps numbers: replace() it first")


def _known_options(
    cls: type, defaults: Mapping[str, Any], named: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options of a group, without flags that are False and that the class lacks."""
    # A class without a flag behaves as if the flag were False.
    named = {key: one for key, one in named.items() if key in defaults or one is not False}
    own = [key for key in defaults if key not in EXECUTION_OPTIONS]
    untold = [key for key in own if key not in named]
    unknown = [key for key in named if key not in defaults]
    if untold or unknown:
        raise ValueError(
            f"{cls.__name__} and this chain name their hyper-parameters differently: "
            f"{'the chain does not tell ' + ', '.join(untold) if untold else ''}"
            f"{'; ' if untold and unknown else ''}"
            f"{'the class has no ' + ', '.join(unknown) if unknown else ''}; pass options={{...}}, "
            "or a class that has this chain"
        )
    return named


def _common_step(states: list[LeafState]) -> int:
    """Return the step count of a group; raise ValueError if its parameters differ in it.

    Parameters before their first step are ignored.
    """
    steps = sorted({int(state.step) for state in states} - {0})
    if len(steps) > 1:
        raise ValueError(
            "this class keeps one step count for a parameter group, and the parameters of a group "
            f"are at the steps {', '.join(map(str, steps))}; give those of one step a group each"
        )
    return steps[0] if steps else 0


def _torch_entries(
    optimizer: Optimizer, path: Path, param: Tensor, state: LeafState, form: StateDictForm
) -> dict[str, Any]:
    stages, hypers = optimizer.stages, optimizer.hypers_at(path, tuple(param.shape))
    entries = plain_entries(stages, hypers, param, to_entries(stages, hypers, param, state))
    step = entries.pop("step")
    if "step" in form.options or not form.counts_steps:
        return entries if int(step) > 0 else {}
    return {"step": int(step) if form.counts_in_python else torch_step(step), **entries}
