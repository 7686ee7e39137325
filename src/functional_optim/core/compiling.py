"""Marks for torch.compile and torch.export: what they trace, and what runs as it is.

A pure step is traced, by the reference, since the other executors look into memory: one program
then makes every step, so no number is taken out of a tensor. What finds state by a tensor, a name
or an address is not traced: a program holds for every tensor of the same shape and dtype, so it
would find one parameter's state for another.
"""

from collections.abc import Callable
from functools import lru_cache, wraps
from types import FunctionType
from typing import ParamSpec, TypeVar

import torch

from functional_optim._torch import disable_dynamo

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Class = TypeVar("_Class", bound=type)


def uncompiled(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """A function that torch.compile runs as it is, with a graph break, and never traces.

    Args:
        function: what changes state that it finds by a tensor, a name or an address.

    Returns:
        The same function, for use as a decorator.
    """
    as_it_is: Callable[_P, _T] = disable_dynamo(function)

    @wraps(function)
    def either(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if torch.compiler.is_compiling():
            return as_it_is(*args, **kwargs)
        return function(*args, **kwargs)

    return either


def uncompiled_class(cls: _Class) -> _Class:
    """A class of which torch.compile traces neither construction nor public methods."""
    for name, found in list(vars(cls).items()):
        if isinstance(found, FunctionType) and (name == "__init__" or not name.startswith("_")):
            setattr(cls, name, uncompiled(found))
    return cls


def remembered(maxsize: int) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """``lru_cache`` for a function of plain values that may be traced, where nothing is kept.

    Args:
        maxsize: how many results are kept.

    Returns:
        A decorator.
    """

    def decorated(function: Callable[_P, _T]) -> Callable[_P, _T]:
        kept: Callable[..., _T] = lru_cache(maxsize)(function)

        @wraps(function)
        def found(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            return kept(*args, **kwargs)

        return found

    return decorated
