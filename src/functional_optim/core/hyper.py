"""Hyper-parameters: built, checked, and turned into numbers for one step.

A value is a number, a 0-d tensor (to differentiate, to vmap, or to fill), or a schedule: a pure
function of the number of steps a leaf has made (0 at its first step). An optimizer has copies of
the tensors that it is given, but of those that autograd follows. Fields annotated ``bool``, ``int``
or ``str | None`` are fixed choices. Nothing out of bounds gets further than this file.
"""

import math
import typing
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from numbers import Real
from types import UnionType
from typing import Any

import torch
from torch import Tensor

from functional_optim.bounds import ANY, Interval
from functional_optim.core.brief import brief, named
from functional_optim.core.scalars import carries_derivative, concrete
from functional_optim.core.schedule_value import ScheduleValue

Schedule = Callable[[Any], Any]
"""A pure function of the number of steps a leaf has made, as a float: 0.0 at its first step."""
Scalar = float | Tensor | Schedule
"""What a constructor takes where its docstring says "a number"."""


NAME = str | None
"""The annotation of a choice by name: the stage's ``check`` says which names there are."""

OPTIONAL = float | None
"""The annotation of a number for which None is a choice of its own."""


class Inherited(Enum):
    """A mark that stays itself when it is copied or pickled."""

    LR = "the chain's"


INHERITED = Inherited.LR
"""Stands for the ``lr`` of a stage that takes it from the rule at the end of its chain."""


_FIXED = frozenset({float, int, bool, str, type(None)})
"""Types of values that nothing changes; a tensor or a list may be filled with others."""


_FIELD_TYPES: dict[Any, dict[str, Any]] = {}
"""What was asked for: a dict, into which torch.compile can look."""


def field_types(hyper_class: Any) -> dict[str, Any]:
    """The annotations of a Hyper, in order."""
    found = _FIELD_TYPES.get(hyper_class)
    if found is None:
        found = _FIELD_TYPES[hyper_class] = typing.get_type_hints(hyper_class)
    return found


def build(
    name: str,
    hyper_class: type,
    bounds: tuple[tuple[str, Interval], ...],
    check: Callable[[Any], None],
    values: Mapping[str, Any],
) -> Any:
    """Make and check a Hyper. ``lr`` may be left out: it is then inherited from the chain.

    Raises:
        TypeError: an unknown or missing field, or a value of a type that is no number.
        ValueError: a value out of its bounds, NaN, or a contradiction between values.
    """
    fields = field_types(hyper_class)
    unknown = [key for key in values if key not in fields]
    if unknown:
        raise TypeError(f"{name} has no hyper-parameter {unknown[0]!r}; it has {', '.join(fields)}")
    defaults: dict[str, Any] = getattr(hyper_class, "_field_defaults", {})
    given = {**defaults, **values}
    if "lr" in fields:
        given.setdefault("lr", INHERITED)
    missing = [key for key in fields if key not in given]
    if missing:
        raise TypeError(f"{name} needs a value for {', '.join(missing)}")
    ordered = {key: given[key] for key in fields}
    return _checked(hyper_class, check, _normal(name, hyper_class, bounds, copy_tensors(ordered)))


def copy_tensors(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyper-parameters whose tensors share memory with no other tensor.

    A tensor that autograd or torch.func follows stays itself: its derivative may be wanted.

    Example::

        >>> lr, betas = torch.tensor(0.5), (torch.tensor(0.5), 0.75)
        >>> copied = copy_tensors({"lr": lr, "betas": betas})
        >>> lr.fill_(0.25)
        tensor(0.2500)
        >>> copied
        {'lr': tensor(0.5000), 'betas': (tensor(0.5000), 0.75)}
    """
    return {name: _copied(value) for name, value in values.items()}


def _copied(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        items = map(_copied, value)
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if not isinstance(value, Tensor) or carries_derivative(value):
        return value
    with torch.inference_mode(mode=False):  # it may be filled outside of that mode, too
        copy = value.detach().clone()
    return value if carries_derivative(copy) else copy  # within torch.func, every copy is followed


def replaced(
    name: str,
    bounds: tuple[tuple[str, Interval], ...],
    check: Callable[[Any], None],
    hyper: Any,
    values: Mapping[str, Any],
) -> Any:
    """A Hyper that was built, with some of its fields changed; the others are not checked again.

    Raises:
        TypeError, ValueError: as of :func:`build`.
    """
    kind = type(hyper)
    changed = _normal(name, kind, bounds, values)
    return _checked(kind, check, {**hyper._asdict(), **changed})


def _normal(
    name: str, hyper_class: Any, bounds: tuple[tuple[str, Interval], ...], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Values of a Hyper, each of its type and within its bounds."""
    fields, limits = field_types(hyper_class), dict(bounds)
    return {
        key: _normalise(f"{name}: {key}", fields[key], value, limits.get(key, ANY))
        for key, value in values.items()
    }


def _checked(hyper_class: Any, check: Callable[[Any], None], values: Mapping[str, Any]) -> Any:
    """A Hyper whose values do not contradict each other, as far as they are known by now."""
    hyper = hyper_class(**values)
    if is_plain(hyper):
        check(hyper)
    return hyper


def _normalise(label: str, kind: Any, value: Any, bound: Interval) -> Any:
    if kind is bool:
        if isinstance(value, bool):
            return value
        raise TypeError(f"{label} must be True or False, got {brief(value)}")
    # By class: torch.compile compares no generic aliases.
    if isinstance(kind, UnionType) and (value is None or str in kind.__args__):
        return _name_or_none(label, value)
    if value is INHERITED or (callable(value) and not isinstance(value, Tensor)):
        return value
    if kind is int:
        return _whole_number(label, value, bound)
    if typing.get_origin(kind) is tuple:
        kinds = typing.get_args(kind)
        if not isinstance(value, (tuple, list)) or len(value) != len(kinds):
            raise TypeError(f"{label} must be a tuple of {len(kinds)} numbers, got {brief(value)}")
        return tuple(
            _normalise(f"{label}[{index}]", one, item, bound)
            for index, (one, item) in enumerate(zip(kinds, value, strict=True))
        )
    return _number(label, value, bound)


def _name_or_none(label: str, value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise TypeError(f"{label} must be a name or None, got {brief(value)}")


def _whole_number(label: str, value: Any, bound: Interval) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value in bound:
        return value
    raise (ValueError if isinstance(value, int) else TypeError)(
        f"{label} must be a whole number ({bound}), got {brief(value)}"
    )


def _number(label: str, value: Any, bound: Interval) -> Any:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"{label} must be a number or a tensor of one element, got a tensor of shape "
                f"{tuple(value.shape)}; to try several values at once, use torch.func.vmap"
            )
        if value.is_complex() or value.dtype == torch.bool:
            raise TypeError(f"{label} must be a number, got a tensor of {value.dtype}")
        known = concrete(value)
        if known is not None and known not in bound:
            raise ValueError(f"{label} must be {bound}, got {known!r}")
        return value if value.dim() == 0 else value.reshape(())
    if type(value) is not float and (not isinstance(value, Real) or isinstance(value, bool)):
        raise TypeError(
            f"{label} must be a number, a 0-d tensor or a schedule (a function of the step), "
            f"got {brief(value)}"
        )
    try:
        number = float(value)
    except OverflowError:  # a whole number beyond the largest float
        number = math.inf
    if number not in bound:  # NaN is in none
        raise ValueError(f"{label} must be {bound}, got {brief(value)}")
    return number


def numbers(coefficients: Any) -> Any:
    """Coefficients with a number for each tensor that nothing differentiates."""
    if is_plain(coefficients):
        return coefficients
    return type(coefficients)(
        *(
            value.item() if isinstance(value, Tensor) and not carries_derivative(value) else value
            for value in coefficients
        )
    )


def mapped(kind: type, change: Callable[[Any], Any], value: Any) -> Any:
    """A Hyper or Coefficients, or several, with ``change(one)`` for each of a kind in it."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, tuple):
        items = [mapped(kind, change, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def is_plain(hyper: Any) -> bool:
    """Return True if every value is a number (or a choice): nothing to resolve at a step."""
    # A loop, and no generator: it is asked at every step whose learning rate is a new one.
    for value in hyper:
        if type(value) in _FIXED:
            continue
        if isinstance(value, tuple):
            if not (_FIXED.issuperset(map(type, value)) or is_plain(value)):
                return False
        elif not isinstance(value, (int, float, str)):
            return False
    return True


def all_plain(hypers: Sequence[tuple[Any, ...]]) -> bool:
    """Return True if no hyper-parameter of any parameter is a schedule or a tensor."""
    return all(is_plain(one) for own in {id(own): own for own in hypers}.values() for one in own)


def is_zero(value: Any) -> bool:
    """Return True if a hyper-parameter is the number 0, and neither a tensor nor a schedule."""
    return isinstance(value, (int, float)) and value == 0


def is_fixed(value: Any) -> bool:
    """Return True if a value stays what it is, as long as it is the same object.

    Example::

        >>> [is_fixed(one) for one in (0.1, (0.9, 0.999), None, [0.9], ([0.9],))]
        [True, True, True, False, False]
    """
    kind = type(value)
    if kind is tuple:
        return _FIXED.issuperset(map(type, value)) or all(map(is_fixed, value))
    return kind in _FIXED


def are_unchanged(before: Sequence[Any], now: Sequence[Any]) -> bool:
    """Return True if values need not be checked again: of the same types as before, and equal."""
    for one, other in zip(before, now, strict=True):
        kind = type(one)
        if one is other:
            if kind not in _FIXED and not callable(one) and not is_fixed(one):
                return False
        elif kind is not type(other) or not (is_fixed(one) and is_fixed(other)) or one != other:
            return False
    return True


def frozen(value: Any) -> Any:
    """A value to compare and hash by: tensors by identity, numbers by value."""
    if isinstance(value, Tensor):
        return (Tensor, id(value))
    if isinstance(value, tuple):
        return tuple(map(frozen, value))
    return value


def shown(value: Any) -> str:
    """A value as one reads it: a schedule by what made it, or its name; a tensor in few digits.

    Example::

        >>> from functional_optim import cosine
        >>> print(shown((cosine(0.5, steps=9), lambda made: 0.1, torch.tensor(0.1))))
        (cosine(0.5, to=0.0, steps=9), <lambda>, tensor(0.1))
    """
    if isinstance(value, Inherited):
        return value.value
    if isinstance(value, Tensor):
        return _shown_tensor(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(shown, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, ScheduleValue):
        return repr(value)
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    return named(value) if callable(value) else repr(value)


def _shown_tensor(value: Tensor) -> str:
    """A 0-d tensor in as few digits as tell its number from every other one of its dtype."""
    number = concrete(value)
    if number is None:
        return "a tensor that hides its number"
    if not value.is_floating_point():
        return f"tensor({int(number)}, dtype={value.dtype})"
    digits = (f"{number:.{count}g}" for count in range(1, 18))
    kept = (text for text in digits if value.new_tensor(float(text)).item() == number)
    parts = [repr(float(next(kept, number)))]
    parts += [] if value.dtype == torch.float32 else [f"dtype={value.dtype}"]
    parts += [] if value.device.type == "cpu" else [f"device={str(value.device)!r}"]
    parts += ["requires_grad=True"] if value.requires_grad else []
    return f"tensor({', '.join(parts)})"


def resolve(
    name: str,
    bounds: tuple[tuple[str, Interval], ...],
    check: Callable[[Any], None],
    hyper: Any,
    step: float | Tensor,
) -> Any:
    """The Hyper of one step: schedules evaluated, tensors in double precision.

    Args:
        step: which step it is, from 1; schedules are given the steps made before it, ``step - 1``.
    """
    if is_plain(hyper):
        return hyper
    limits = dict(bounds)
    hyper_class: Any = type(hyper)
    kinds = field_types(hyper_class)
    values = {
        key: _resolve(f"{name}: {key}", kinds[key], value, limits.get(key, ANY), step)
        for key, value in zip(hyper._fields, hyper, strict=True)
    }
    resolved = type(hyper)(**values)
    if is_plain(resolved):
        check(resolved)
    return resolved


def _at(schedule: Schedule, made: float | Tensor, label: str) -> Any:
    """A schedule's value after ``made`` steps."""
    try:
        return schedule(made)
    except RuntimeError as error:
        if isinstance(made, Tensor):
            error.add_note(
                f"the schedule of {label} got a step count that torch.func hides: write it with "
                "torch's operations, or pass the value to update"
            )
        raise


def _resolve(label: str, kind: Any, value: Any, bound: Interval, step: float | Tensor) -> Any:
    if isinstance(value, Tensor):
        # One that is only a number in a tensor stays in its dtype, as torch.optim computes with it.
        return value.to(torch.float64) if carries_derivative(value) else value
    if callable(value):
        made = _normalise(f"{label} (from its schedule)", kind, _at(value, step - 1, label), bound)
        return _resolve(label, kind, made, bound, step)
    if isinstance(value, tuple):
        kinds = typing.get_args(kind)
        return tuple(
            _resolve(f"{label}[{index}]", one, item, bound, step)
            for index, (one, item) in enumerate(zip(kinds, value, strict=True))
        )
    return value
