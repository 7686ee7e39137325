"""Constructors: functions of hyper-parameters that build an optimizer or a link."""

import functools
import inspect
import re
import types
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import Tensor, nn

_Constructor = TypeVar("_Constructor", bound=Callable[..., Any])

CONSTRUCTORS: list[Callable[..., Any]] = []
"""Public constructors. The ``repr`` of links is a call of the constructor that builds them."""

RAISES = "Raises:\n    ValueError: a value outside the bounds above.\n\n"
"""The section of errors of most constructors."""

_STAGE_PREFIX = re.compile(r"[a-z_]\w*: ")
"""Start of an error about a hyper-parameter: the name of its stage."""


def register_link_constructors(*functions: Callable[..., Any]) -> None:
    """Add constructors of links to :data:`CONSTRUCTORS`."""
    CONSTRUCTORS.extend(functions)


def constructor(function: _Constructor) -> _Constructor:
    """Decorate a function of hyper-parameters that builds an optimizer.

    The decorator adds the function to :data:`CONSTRUCTORS`, with :func:`with_constructor_errors`.
    A docstring without the section "Raises" gets the one that most constructors have.
    """
    text = function.__doc__
    if text is not None and "Raises:" not in text:
        function.__doc__ = inspect.cleandoc(text).replace("Example::", f"{RAISES}Example::", 1)
    made = with_constructor_errors(function)
    CONSTRUCTORS.append(made)
    return made


def with_constructor_errors(function: _Constructor) -> _Constructor:
    """Decorate a function of hyper-parameters with the errors that all constructors have.

    If it gets parameters, the error shows the right call. An error about a hyper-parameter starts
    with the name of the function, not of the stage.
    """
    name = function.__name__
    refuse, renamed = _refuse_parameters, prefix_error

    def build(*args: Any, **kwargs: Any) -> Any:
        refuse(name, args, kwargs)
        try:
            return function(*args, **kwargs)
        except (TypeError, ValueError) as error:
            renamed(name, error)
            raise

    # With the globals of the function, so that doctest finds it in the function's module.
    own = types.FunctionType(build.__code__, function.__globals__, name, None, build.__closure__)
    return cast("_Constructor", functools.wraps(function)(own))


def _refuse_parameters(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise TypeError with the right calls if an argument has parameters, as for torch.optim."""
    if (args and has_parameters(args[0])) or "params" in kwargs:
        raise TypeError(
            f"{name} takes hyper-parameters only, and was given parameters: write "
            f"TorchOptimizer(params, {name}(lr=...)) for a torch.optim.Optimizer, whose step() "
            f"reads .grad; or {name}(lr=...).init(params) for the pure function"
        )


def has_parameters(value: Any) -> bool:
    """Return True if classes of torch.optim would accept a value as ``params``."""
    if isinstance(value, (nn.Module, types.GeneratorType)):
        return True
    if isinstance(value, dict):
        return "params" in value or any(isinstance(one, Tensor) for one in value.values())
    if isinstance(value, (list, tuple)) and value:
        first = value[0]
        is_named = isinstance(first, tuple) and any(isinstance(one, Tensor) for one in first)
        return isinstance(first, Tensor) or is_named or has_parameters(first)
    return inspect.isgenerator(value)


def prefix_error(name: str, error: Exception) -> None:
    """Replace the stage name at the start of an error by the name of the constructor, in place."""
    if error.args and isinstance(error.args[0], str):
        prefix = _STAGE_PREFIX.match(error.args[0])
        if prefix is not None:
            error.args = (f"{name}: {error.args[0][prefix.end() :]}", *error.args[1:])
