"""Creation of named tuples without a Python call, for code that runs in each step."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

_Record = TypeVar("_Record", bound=tuple[Any, ...])


def from_fields(cls: type[_Record]) -> Callable[[tuple[Any, ...]], _Record]:
    """Return a function that creates a named tuple from the tuple of all of its fields.

    The constructor of a named tuple is a Python function, and this one is a C function.
    """
    return partial(tuple.__new__, cls)
