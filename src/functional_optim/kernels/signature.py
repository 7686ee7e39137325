"""Signature of the graph of a leaf, without the numbers that change with the step.

Floats among the coefficients are inputs of the graph. All other coefficients, such as flags and
integers, are static: a rule may branch on them, and each combination has its own graph.
"""

import typing
from collections.abc import Iterator, Sequence
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from functional_optim.core.hyper import field_types
from functional_optim.core.leaf import Leaf
from functional_optim.core.scalars import carries_derivative
from functional_optim.core.stage import Stage
from functional_optim.kernels.errors import UntraceableError
from functional_optim.kernels.free_variables import free_variables


class Varies(Enum):
    """Type of :data:`VARIES`. An enum member stays the same object after pickling."""

    VARIES = "changes with the step"


VARIES = Varies.VARIES
"""Placeholder, in static coefficients, of a number that changes with the step."""


class Container(NamedTuple):
    """Static form of a coefficient that is a tuple, a list or a NamedTuple."""

    kind: Any
    items: tuple[Any, ...]


class Signature(NamedTuple):
    """Signature of a graph, in addition to the stages."""

    static: tuple[Any, ...]
    """The coefficients of each stage, with :data:`VARIES` for every number."""
    fields: tuple[tuple[int | None, ...], ...]
    """For each field of each stage's state, the number of tensors in its list; None if no list."""
    free: tuple[Any, ...] = ()
    """The key of the free variables of the stages' functions."""


Numbers = list[Any]
"""Numbers that change with the step: floats, or 0-d tensors on the device."""


def signature(
    stages: Sequence[Stage], leaf: Leaf, *, on_device: bool = False
) -> tuple[Signature, Numbers, list[Tensor]]:
    """Return the signature of a leaf's graph, its numbers, and its tensors (param, grad, state).

    ``on_device`` treats coefficients that are 0-d tensors as numbers.
    """
    free = free_variables(stages)
    if free.reason is not None:
        raise UntraceableError(free.reason)
    values: Numbers = []
    static = tuple(
        _split(stage.name, one, _Collector(values, on_device))
        for stage, one in zip(stages, leaf.coefficients, strict=True)
    )
    tensors = [leaf.param, leaf.grad]
    fields = tuple(
        tuple(_collect(value, tensors) for value in state) if state else () for state in leaf.states
    )
    return Signature(static, fields, free.key), values, tensors


class _Collector(NamedTuple):
    """List that receives the numbers, and True if 0-d tensors are numbers."""

    values: Numbers
    on_device: bool


def _collect(value: Any, tensors: list[Tensor]) -> int | None:
    if isinstance(value, list):
        tensors.extend(value)
        return len(value)
    tensors.append(value)
    return None


@lru_cache(maxsize=None)
def _kinds(coefficients_class: Any) -> tuple[Any, ...]:
    return tuple(field_types(coefficients_class).values())


def _split(name: str, coefficients: Any, collector: _Collector) -> tuple[Any, ...]:
    coefficients_class: Any = type(coefficients)
    kinds = _kinds(coefficients_class)
    return tuple(
        _split_one(name, value, kind, collector)
        for value, kind in zip(coefficients, kinds, strict=True)
    )


def _split_one(name: str, value: Any, kind: Any, collector: _Collector) -> Any:
    if type(value) is float:
        collector.values.append(value)
        return VARIES
    if isinstance(value, (tuple, list)):
        kinds = _kinds_of_items(kind, value)
        items = (_split_one(name, v, k, collector) for v, k in zip(value, kinds, strict=True))
        return Container(type(value), tuple(items))
    if isinstance(value, Tensor) and collector.on_device and not carries_derivative(value):
        collector.values.append(value)
        return VARIES
    if isinstance(value, Tensor):
        raise UntraceableError(
            f"{name} has a hyper-parameter that is a tensor with a derivative: only the reference "
            "executor differentiates; use float(value), or executor='reference'"
        )
    if isinstance(value, float) or (kind is float and type(value) is int):
        collector.values.append(float(value))
        return VARIES
    if type(value).__hash__ is None:
        raise UntraceableError(
            f"{name} has a coefficient of type {type(value).__name__}, which changes in place: "
            "make it a NamedTuple of numbers"
        )
    return value


def _kinds_of_items(kind: Any, value: Sequence[Any]) -> tuple[Any, ...]:
    """Return the declared types of the items of a tuple, list or NamedTuple."""
    if hasattr(value, "_fields"):
        return _kinds(type(value))
    said = typing.get_args(kind)
    if len(said) == 2 and said[1] is ...:
        said = said[:1]
    return said if len(said) == len(value) else (said or (kind,))[:1] * len(value)


def insert_numbers(static: Any, numbers: Iterator[Any]) -> Any:
    """Return a coefficient from its static form, and from ``numbers`` (or proxies)."""
    if static is VARIES:
        return next(numbers)
    if isinstance(static, Container):
        items = [insert_numbers(one, numbers) for one in static.items]
        return static.kind(*items) if hasattr(static.kind, "_fields") else static.kind(items)
    return static
