"""The arguments of torch.optim classes: which of them change numbers, and under what names."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch

EXECUTION_OPTIONS = ("foreach", "fused", "capturable", "differentiable")
"""Arguments that choose an implementation, not numbers. They are taken and have no effect: here
the executor is chosen apart (``optimizer.using(executor=...)``)."""


def is_optimizer_class(key: Any) -> bool:
    """Whether a key of the registry is a subclass of torch.optim.Optimizer."""
    return isinstance(key, type) and issubclass(key, torch.optim.Optimizer)


def is_open(cls: type) -> bool:
    """Whether a class takes ``**kwargs``, so that its signature does not tell all it takes."""
    kinds = [one.kind for one in inspect.signature(cls).parameters.values()]
    return inspect.Parameter.VAR_KEYWORD in kinds


def factory_arguments(
    key: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the factory of a key is called with, for ``key(params, *args, **kwargs)``.

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
