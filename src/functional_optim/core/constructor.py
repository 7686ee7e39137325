"""Constructors: functions that build an optimizer, or a link, of hyper-parameters alone."""

import functools
import inspect
import re
import types
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import Tensor, nn

_Constructor = TypeVar("_Constructor", bound=Callable[..., Any])

CONSTRUCTORS: list[Callable[..., Any]] = []
"""Public constructors, by which ``repr`` spells the links that they build."""

_NAMED_BY_STAGE = re.compile(r"[a-z_]\w*: ")
"""Pattern of the beginning of an error about a hyper-parameter: the name of its stage."""


def links_constructors(*functions: Callable[..., Any]) -> None:
    """Add constructors of links to :data:`CONSTRUCTORS`."""
    CONSTRUCTORS.extend(functions)


def constructor(function: _Constructor) -> _Constructor:
    """Mark a function that builds an optimizer of links.

    The function is added to :data:`CONSTRUCTORS`, and has :func:`constructor_errors`.

    Args:
        function: takes hyper-parameters only.

    Returns:
        The same function with these errors.

    Example::

        >>> from functional_optim import adamw
        >>> adamw(lr=-1.0)
        Traceback (most recent call last):
            ...
        ValueError: adamw: lr must be a finite number >= 0, got -1.0
    """
    made = constructor_errors(function)
    CONSTRUCTORS.append(made)
    return made


def constructor_errors(function: _Constructor) -> _Constructor:
    """Give a function that builds an optimizer the errors that all constructors have.

    If it is given parameters, the error shows the right call. An error about a hyper-parameter
    names the function, not the stage inside.

    Args:
        function: takes hyper-parameters only.
    """
    name = function.__name__
    refuse, renamed = _refuse_parameters, name_constructor

    def build(*args: Any, **kwargs: Any) -> Any:
        refuse(name, args, kwargs)
        try:
            return function(*args, **kwargs)
        except (TypeError, ValueError) as error:
            renamed(name, error)
            raise

    # With the globals of the function, so that doctest counts it to the function's module.
    own = types.FunctionType(build.__code__, function.__globals__, name, None, build.__closure__)
    return cast("_Constructor", functools.wraps(function)(own))


def _refuse_parameters(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse the call of a class of torch.optim.

    Raises:
        TypeError: an argument holds parameters; the error shows the right calls.
    """
    if (args and holds_parameters(args[0])) or "params" in kwargs:
        raise TypeError(
            f"{name} takes hyper-parameters only, and was given parameters: write "
            f"TorchOptimizer(params, {name}(lr=...)) for a torch.optim.Optimizer, whose step() "
            f"reads .grad; or {name}(lr=...).init(params) for the pure function"
        )


def holds_parameters(value: Any) -> bool:
    """Return True if a value is what a class of torch.optim takes as ``params``."""
    if isinstance(value, (nn.Module, types.GeneratorType)):
        return True
    if isinstance(value, dict):
        return "params" in value or any(isinstance(one, Tensor) for one in value.values())
    if isinstance(value, (list, tuple)) and value:
        first = value[0]
        is_named = isinstance(first, tuple) and any(isinstance(one, Tensor) for one in first)
        return isinstance(first, Tensor) or is_named or holds_parameters(first)
    return inspect.isgenerator(value)


def name_constructor(name: str, error: Exception) -> None:
    """Let an error about a hyper-parameter begin with the name of the constructor."""
    if error.args and isinstance(error.args[0], str):
        text = _NAMED_BY_STAGE.sub(f"{name}: ", error.args[0], count=1)
        if _NAMED_BY_STAGE.match(error.args[0]):
            error.args = (text, *error.args[1:])
