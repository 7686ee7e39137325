"""Decorators that exclude functions from torch.compile.

torch.compile traces ``update`` by the reference executor, since other executors read addresses. A
traced program runs for every tensor of the same shape and dtype. So functions that look up state by
a tensor, a name or an address must not be traced: they would find the state of another parameter.
"""

from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import ParamSpec, TypeVar

import torch

from functional_optim._torch.compilers import disable_dynamo

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Class = TypeVar("_Class", bound=type)


def disable_compile(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate a function that torch.compile must run with a graph break, and not trace.

    Outside of torch.compile, calls do not go through ``torch.compiler.disable``, which is slow.
    """
    disabled: Callable[_P, _T] = disable_dynamo(function)

    @wraps(function)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if torch.compiler.is_dynamo_compiling():
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    return wrapper


def disable_compile_of_class(cls: _Class) -> _Class:
    """Decorate a class: torch.compile traces neither its construction nor its public methods."""
    for name, found in list(vars(cls).items()):
        if isinstance(found, FunctionType) and (name == "__init__" or not name.startswith("_")):
            setattr(cls, name, disable_compile(found))
    return cls
