"""Signature of a leaf's graph, apart from the numbers of each step.

Numbers in double precision change with the step. Flags and whole numbers among the coefficients
are choices that a rule may branch on: each combination of them is a graph of its own.
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
    """A mark that is itself in every process, and is no value that a coefficient may have."""

    VARIES = "changes with the step"


VARIES = Varies.VARIES
"""Stands, among static coefficients, for a number that changes with the step."""


class Several(NamedTuple):
    """Stands, among static coefficients, for a tuple, a list or a NamedTuple."""

    kind: Any
    items: tuple[Any, ...]


class Signature(NamedTuple):
    """Signature of a graph, apart from the stages."""

    static: tuple[Any, ...]
    """The coefficients of each stage, with :data:`VARIES` for every number."""
    fields: tuple[tuple[int | None, ...], ...]
    """For each field of each stage's state, how many tensors are in its list (None: no list)."""
    free: tuple[Any, ...] = ()
    """The key of the free variables of the stages' functions."""


Numbers = list[Any]
"""Numbers that change with the step: floats; on a device, where that is asked for, 0-d tensors."""


def signature(
    stages: Sequence[Stage], leaf: Leaf, *, on_device: bool = False
) -> tuple[Signature, Numbers, list[Tensor]]:
    """Return the signature of a leaf's graph, its numbers, and its tensors (param, grad, state).

    Args:
        stages: of the chain.
        leaf: to be stepped.
        on_device: whether coefficients that are 0-d tensors are taken for numbers.

    Raises:
        UntraceableError: a coefficient that is a tensor, with a derivative if ``on_device``; a
            stage that reads a variable which may change.
    """
    free = free_variables(stages)
    if free.reason is not None:
        raise UntraceableError(free.reason)
    values: Numbers = []
    static = tuple(
        _split(stage.name, one, _Taken(values, on_device))
        for stage, one in zip(stages, leaf.coefficients, strict=True)
    )
    tensors = [leaf.param, leaf.grad]
    fields = tuple(
        tuple(_take(value, tensors) for value in state) if state else () for state in leaf.states
    )
    return Signature(static, fields, free.key), values, tensors


class _Taken(NamedTuple):
    """Numbers that were found, and whether tensors count as such."""

    values: Numbers
    on_device: bool


def _take(value: Any, tensors: list[Tensor]) -> int | None:
    if isinstance(value, list):
        tensors.extend(value)
        return len(value)
    tensors.append(value)
    return None


@lru_cache(maxsize=None)
def _kinds(coefficients_class: Any) -> tuple[Any, ...]:
    return tuple(field_types(coefficients_class).values())


def _split(name: str, coefficients: Any, taken: _Taken) -> tuple[Any, ...]:
    coefficients_class: Any = type(coefficients)
    kinds = _kinds(coefficients_class)
    return tuple(
        _split_one(name, value, kind, taken)
        for value, kind in zip(coefficients, kinds, strict=True)
    )


def _split_one(name: str, value: Any, kind: Any, taken: _Taken) -> Any:
    if type(value) is float:
        taken.values.append(value)
        return VARIES
    if isinstance(value, (tuple, list)):
        kinds = _kinds_of_items(kind, value)
        items = (_split_one(name, v, k, taken) for v, k in zip(value, kinds, strict=True))
        return Several(type(value), tuple(items))
    if isinstance(value, Tensor) and taken.on_device and not carries_derivative(value):
        taken.values.append(value)
        return VARIES
    if isinstance(value, Tensor):
        raise UntraceableError(
            f"{name} has a hyper-parameter that is a tensor with a derivative: only the reference "
            "executor differentiates; use float(value), or executor='reference'"
        )
    if isinstance(value, float) or (kind is float and type(value) is int):
        taken.values.append(float(value))
        return VARIES
    if type(value).__hash__ is None:
        raise UntraceableError(
            f"{name} has a coefficient of type {type(value).__name__}, which changes in place: "
            "make it a NamedTuple of numbers"
        )
    return value


def _kinds_of_items(kind: Any, value: Sequence[Any]) -> tuple[Any, ...]:
    """Return the declared types of a tuple's, list's or NamedTuple's items."""
    if hasattr(value, "_fields"):
        return _kinds(type(value))
    said = typing.get_args(kind)
    if len(said) == 2 and said[1] is ...:
        said = said[:1]
    return said if len(said) == len(value) else (said or (kind,))[:1] * len(value)


def joined(static: Any, numbers: Iterator[Any]) -> Any:
    """Return a static coefficient, with ``numbers`` (or stand-ins) where it varies."""
    if static is VARIES:
        return next(numbers)
    if isinstance(static, Several):
        items = [joined(one, numbers) for one in static.items]
        return static.kind(*items) if hasattr(static.kind, "_fields") else static.kind(items)
    return static
