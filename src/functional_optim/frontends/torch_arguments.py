"""The arguments of torch.optim classes: which of them change numbers, and under what names."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

EXECUTION_OPTIONS = ("foreach", "fused", "capturable", "differentiable")
"""Arguments that choose an implementation, not numbers. They are taken and have no effect: here
the executor is chosen apart (``optimizer.using(executor=...)``)."""


def is_optimizer_class(key: Any) -> bool:
    """Return True if a key of the registry is a subclass of torch.optim.Optimizer."""
    return isinstance(key, type) and issubclass(key, torch.optim.Optimizer)


def is_open(cls: Callable[..., Any]) -> bool:
    """Return True if a class or function takes ``**kwargs``: its signature does not tell all."""
    kinds = [one.kind for one in inspect.signature(cls).parameters.values()]
    return inspect.Parameter.VAR_KEYWORD in kinds


def step_once(probe: torch.optim.Optimizer, param: Tensor) -> None:
    """Step a throw-away instance by a gradient of zeros, a sparse one if its class takes no other.

    Hooks that a user may have on every step are not called.
    """
    step = inspect.unwrap(type(probe).step)
    param.grad = torch.zeros_like(param)
    with torch.no_grad():
        try:
            step(probe)
        except RuntimeError:  # it takes sparse gradients only
            param.grad = param.grad.to_sparse(1)
            step(probe)


def factory_arguments(
    key: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a key's factory for ``key(params, *args, **kwargs)``.

    For an optimizer class, its own defaults are filled in, and those options are left out that
    choose an implementation; a key that is no such class hands its arguments on.

    Raises:
        TypeError: an argument that the class does not have.
    """
    if not is_optimizer_class(key):
        return args, dict(kwargs)
    signature = inspect.signature(key)
    bound = signature.bind(None, *args, **kwargs)
    bound.apply_defaults()
    positional: tuple[Any, ...] = ()
    named: dict[str, Any] = {}
    for name, value in list(bound.arguments.items())[1:]:
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            positional = tuple(value)
        elif kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        else:
            named[name] = value
    return positional, {
        name: value for name, value in named.items() if name not in EXECUTION_OPTIONS
    }


def require_arguments(cls: type, factory: Callable[..., Any]) -> None:
    """Make sure that a factory takes the arguments of a class, and needs no others.

    Args:
        cls: a subclass of torch.optim.Optimizer.
        factory: takes the arguments of the class without the first, ``params``.

    Raises:
        TypeError: lists the arguments that the factory lacks, and those that the class lacks.
    """
    try:
        taken = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # written in C
        return
    own = list(inspect.signature(cls).parameters.values())[1:]
    names = {one.name for one in own if one.kind in _BY_NAME} - set(EXECUTION_OPTIONS)
    by_name = {name for name, one in taken.items() if one.kind in _BY_NAME}
    lacking = [] if is_open(factory) else sorted(names - by_name)
    needed = [
        name
        for name, one in taken.items()
        if one.default is one.empty and one.kind not in _VARIADIC and name not in names
    ]
    if not lacking and (not needed or is_open(cls)):
        return
    told = [f"the factory does not take {', '.join(lacking)}"] if lacking else []
    told += [f"the class does not have {', '.join(needed)}"] if needed else []
    raise TypeError(
        f"the factory of {cls.__name__} must take its arguments after params, since it is called "
        f"with all of them: {'; '.join(told)}. Let the factory take each by name, and refuse a "
        "value that it cannot honour"
    )


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
