"""NamedTuples without fields, which TorchScript saves in a form that it cannot load.

A stage without hyper-parameters has such a NamedTuple. In a program, its type is that of ``()``.
"""

import inspect
import typing
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

from functional_optim.core.stage import NoState


def without_empty_records(functions: Sequence[Any]) -> tuple[list[Any], Callable[[Any], Any]]:
    """Return functions without empty NamedTuples in annotations, and a converter of types.

    TorchScript looks up the names of annotations among the globals of a function. So a copy of the
    function has other globals. Functions whose globals lack the NamedTuple are returned unchanged.
    """
    plain = list(filter(inspect.isfunction, functions))
    named = [(one, [kind for kind in _types_of(one) if _is_empty(kind)]) for one in plain]
    if not all(_has_name(one, kind) for one, kinds in named for kind in kinds):
        return list(functions), lambda kind: kind
    changed = {id(one) for one, kinds in named if kinds}
    made = [_with_other_globals(one) if id(one) in changed else one for one in functions]
    return made, _convert


def _types_of(function: Any) -> list[Any]:
    return list(typing.get_type_hints(function).values())


def _is_empty(kind: Any) -> bool:
    """Return True for a NamedTuple without fields."""
    return isinstance(kind, type) and getattr(kind, "_fields", None) == ()


def _has_name(function: Any, kind: Any) -> bool:
    """Return True if a function finds this type among its globals, and has no closure."""
    names = function.__globals__
    return function.__closure__ is None and any(value is kind for value in names.values())


def _convert(kind: Any) -> Any:
    return NoState if _is_empty(kind) else kind


def _with_other_globals(function: Any) -> Any:
    names = {name: _convert(value) for name, value in function.__globals__.items()}
    made = FunctionType(function.__code__, names, function.__name__)
    made.__module__ = function.__module__
    made.__annotations__ = {k: _convert(v) for k, v in typing.get_type_hints(function).items()}
    return made
