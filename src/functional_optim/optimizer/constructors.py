"""Calls of functions that may return an Optimizer, or may need parameters as torch.optim does."""

import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

import torch

from functional_optim.core.closure_optimizer import refuse_closure
from functional_optim.core.format import format_value
from functional_optim.core.stage import Stage
from functional_optim.optimizer import Optimizer

PARTS = "a front-end that steps parts of the parameters (ZeRO, DistributedOptimizer, a hook)"
"""The front-ends that refuse an optimizer that evaluates the loss itself."""


def call_constructor(
    constructor: Callable[..., Any], arguments: Mapping[str, Any]
) -> Optimizer | None:
    """Call a function that returns an Optimizer; return None if the function needs parameters.

    A function annotated with ``-> Optimizer`` is called. Without an annotation, its signature
    decides: constructors of an Optimizer take hyper-parameters only, and constructors of a
    torch.optim.Optimizer take ``params`` first. For a class, the result is None.
    """
    if isinstance(constructor, type):
        return None
    if isinstance(constructor, Stage):
        raise TypeError(
            f"{format_value(constructor)} makes a link of a chain, and no optimizer: give "
            f"lambda **hyper: chain({constructor.name}(**hyper))"
        )
    declared, error = _declared_class(constructor), _binding_error(constructor, arguments)
    if declared is torch.optim.Optimizer:
        return None
    if declared is None and (
        _has_params(constructor)
        or (error is not None and _binding_error(constructor, arguments, None) is None)
    ):
        return None  # its first argument is the parameters, under any name
    if error is not None:
        raise TypeError(f"{format_value(constructor)} makes an optimizer, but {error}")
    made = constructor(**arguments)
    refuse_closure(made, PARTS)
    if isinstance(made, Optimizer):
        return made
    if isinstance(made, torch.optim.Optimizer):
        return None
    raise TypeError(
        "a constructor must return a functional_optim.Optimizer if it is called with "
        "hyper-parameters, such as chain(...), or a torch.optim.Optimizer if it is called with "
        f"parameters; {format_value(constructor)} returned {format_value(made)}"
    )


def _declared_class(constructor: Any) -> type | None:
    """Return the class of optimizer in a function's return annotation, or None."""
    while isinstance(constructor, functools.partial):
        constructor = constructor.func
    if not inspect.isroutine(constructor):
        constructor = type(constructor).__call__
    try:
        found = typing.get_type_hints(constructor).get("return")
    except (NameError, TypeError):  # a name for type checkers only; or implemented in C
        return None
    kinds: tuple[type, ...] = (Optimizer, torch.optim.Optimizer)
    return next((one for one in kinds if isinstance(found, type) and issubclass(found, one)), None)


def _has_params(constructor: Any) -> bool:
    """Return True if a function has an argument ``params``, or ``*args``."""
    try:
        given = list(inspect.signature(constructor).parameters.values())
    except (TypeError, ValueError):  # implemented in C
        return True
    return any(one.name == "params" or one.kind is one.VAR_POSITIONAL for one in given)


def _binding_error(constructor: Any, arguments: Mapping[str, Any], *positional: Any) -> str | None:
    """Return the error of a call with these arguments, or None if they fit the signature."""
    try:
        inspect.signature(constructor).bind(*positional, **arguments)
    except TypeError as error:
        return str(error)
    return None
