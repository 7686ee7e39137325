"""Hyper-parameters: building, checking, and evaluation for one step.

A value is a number, a 0-d tensor (to differentiate, vmap or fill), or a schedule: a pure function
of the number of steps that a leaf has made (0 in its first step). An optimizer copies its tensors,
except tensors that autograd tracks. Fields annotated ``bool``, ``int`` or ``str | None`` are static
options.
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
from functional_optim.core.format import format_value, function_name
from functional_optim.core.on_global_step import require_counted
from functional_optim.core.scalars import carries_derivative, concrete
from functional_optim.core.schedule_value import ScheduleValue

Schedule = Callable[[Any], Any]
"""Pure function of the number of steps that a leaf has made, as a float: 0.0 in its first step."""
Scalar = float | Tensor | Schedule
"""Type of the arguments that docstrings of constructors call "a number"."""


NAME = str | None
"""Annotation of a string option. The stage's ``check`` has the valid strings."""

OPTIONAL = float | None
"""Annotation of a number that may be None."""


class Inherited(Enum):
    """Type of a sentinel that is identical after copying and pickling."""

    LR = "the chain's"


INHERITED = Inherited.LR
"""Sentinel for the ``lr`` of a stage that gets the ``lr`` of the last rule of its chain."""


FIXED = frozenset({float, int, bool, str, type(None)})
"""Immutable types of values. A test with them needs no call per stage."""


_FIELD_TYPES: dict[Any, dict[str, Any]] = {}
"""Cache of :func:`field_types`: a dict, since torch.compile can trace lookups in a dict."""


def field_types(hyper_class: Any) -> dict[str, Any]:
    """Return the annotations of a Hyper class, in order."""
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
    """Build and check a Hyper. A missing ``lr`` is inherited from the chain."""
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
    return _build_checked(
        hyper_class, check, _normalize_all(name, hyper_class, bounds, copy_tensors(ordered))
    )


def copy_tensors(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyper-parameters with copies of their tensors.

    A tensor that autograd or torch.func tracks is not copied, so that it can be differentiated.
    """
    return {name: map_values(Tensor, _copy_tensor, value) for name, value in values.items()}


def _copy_tensor(value: Tensor) -> Tensor:
    if carries_derivative(value):
        return value
    with torch.inference_mode(mode=False):  # the copy may be filled outside of inference mode
        copy = value.detach().clone()
    return value if carries_derivative(copy) else copy  # torch.func tracks every copy


def replace_fields(
    name: str,
    bounds: tuple[tuple[str, Interval], ...],
    check: Callable[[Any], None],
    hyper: Any,
    values: Mapping[str, Any],
) -> Any:
    """Return a Hyper with some fields replaced; only these are checked for types and bounds."""
    kind = type(hyper)
    changed = _normalize_all(name, kind, bounds, values)
    return _build_checked(kind, check, {**hyper._asdict(), **changed})


def _normalize_all(
    name: str, hyper_class: Any, bounds: tuple[tuple[str, Interval], ...], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Convert the values of a Hyper to their types, and check their bounds."""
    fields, limits = field_types(hyper_class), dict(bounds)
    return {
        key: _normalize(f"{name}: {key}", fields[key], value, limits.get(key, ANY))
        for key, value in values.items()
    }


def _build_checked(
    hyper_class: Any, check: Callable[[Any], None], values: Mapping[str, Any]
) -> Any:
    """Build a Hyper, and check it if its values do not depend on the step or on tensors."""
    hyper = hyper_class(**values)
    if is_plain(hyper):
        check(hyper)
    return hyper


def _normalize(label: str, kind: Any, value: Any, bound: Interval) -> Any:
    if kind is bool:
        if isinstance(value, bool):
            return value
        raise TypeError(f"{label} must be True or False, got {format_value(value)}")
    # By class, since torch.compile cannot compare generic aliases.
    if isinstance(kind, UnionType) and (value is None or str in kind.__args__):
        return _check_name(label, value)
    if value is INHERITED or (callable(value) and not isinstance(value, Tensor)):
        return value
    if kind is int:
        return _check_int(label, value, bound)
    if typing.get_origin(kind) is tuple:
        kinds = typing.get_args(kind)
        if not isinstance(value, (tuple, list)) or len(value) != len(kinds):
            raise TypeError(
                f"{label} must be a tuple of {len(kinds)} numbers, got {format_value(value)}"
            )
        return tuple(
            _normalize(f"{label}[{index}]", one, item, bound)
            for index, (one, item) in enumerate(zip(kinds, value, strict=True))
        )
    return _check_number(label, value, bound)


def _check_name(label: str, value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise TypeError(f"{label} must be a name or None, got {format_value(value)}")


def _check_int(label: str, value: Any, bound: Interval) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value in bound:
        return value
    raise (ValueError if isinstance(value, int) else TypeError)(
        f"{label} must be a whole number ({bound}), got {format_value(value)}"
    )


def _check_number(label: str, value: Any, bound: Interval) -> Any:
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
            f"got {format_value(value)}"
        )
    try:
        number = float(value)
    except OverflowError:  # a whole number beyond the largest float
        number = math.inf
    if number not in bound:  # NaN is in none
        raise ValueError(f"{label} must be {bound}, got {format_value(value)}")
    return number


def to_floats(coefficients: Any) -> Any:
    """Replace tensors in coefficients by numbers, except tensors with a derivative."""
    if is_plain(coefficients):
        return coefficients
    return type(coefficients)(
        *(
            value.item() if isinstance(value, Tensor) and not carries_derivative(value) else value
            for value in coefficients
        )
    )


def map_values(kind: type, change: Callable[[Any], Any], value: Any) -> Any:
    """Apply ``change`` to every value of type ``kind`` in nested tuples and lists."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (tuple, list)):
        items = [map_values(kind, change, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def is_plain(hyper: Any) -> bool:
    """Return True if no value is a schedule or a tensor."""
    # A loop is faster than a generator. This runs in every step with a new learning rate.
    for value in hyper:
        if type(value) in FIXED:
            continue
        if isinstance(value, tuple):
            if not (FIXED.issuperset(map(type, value)) or is_plain(value)):
                return False
        elif not isinstance(value, (int, float, str)):
            return False
    return True


def is_all_plain(hypers: Sequence[tuple[Any, ...]]) -> bool:
    """Return True if no hyper-parameter of any leaf is a schedule or a tensor."""
    return all(is_plain(one) for own in {id(own): own for own in hypers}.values() for one in own)


def is_zero(value: Any) -> bool:
    """Return True if a hyper-parameter is the number 0, not a tensor or a schedule."""
    return isinstance(value, (int, float)) and value == 0


def is_fixed(value: Any) -> bool:
    """Return True if a value is immutable, so that its identity proves that it is unchanged."""
    kind = type(value)
    if kind is tuple:
        return FIXED.issuperset(map(type, value)) or all(map(is_fixed, value))
    return kind in FIXED


def are_unchanged(before: Sequence[Any], now: Sequence[Any]) -> bool:
    """Return True if values are immutable, equal, and of the same types as before."""
    for one, other in zip(before, now, strict=True):
        kind = type(one)
        if one is other:
            if kind not in FIXED and not callable(one) and not is_fixed(one):
                return False
        elif kind is not type(other) or not (is_fixed(one) and is_fixed(other)) or one != other:
            return False
    return True


def hash_key(value: Any) -> Any:
    """Return a hashable key of a value: tensors by identity, numbers by value."""
    if isinstance(value, Tensor):
        return (Tensor, id(value))
    if isinstance(value, tuple):
        return tuple(map(hash_key, value))
    return value


def format_hyper(value: Any) -> str:
    """Format a value: a schedule by its constructor or name, a tensor with few digits."""
    if isinstance(value, Inherited):
        return value.value
    if isinstance(value, Tensor):
        return _format_tensor(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(format_hyper, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, ScheduleValue):
        return repr(value)
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    return function_name(value) if callable(value) else repr(value)


def _format_tensor(value: Tensor) -> str:
    """Format a 0-d tensor with the fewest digits that identify the number in its dtype."""
    number = concrete(value)
    if number is None:
        return "a tensor that hides its number"
    if not value.is_floating_point():
        return f"tensor({int(number)}, dtype={value.dtype})"
    digits = (f"{number:.{count}g}" for count in range(1, 18))
    exact = (text for text in digits if value.new_tensor(float(text)).item() == number)
    parts = [repr(float(next(exact, number)))]
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
    """Evaluate schedules for step ``step`` (from 1), and convert tracked tensors to float64."""
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


def _at(schedule: Schedule, step: float | Tensor, label: str) -> Any:
    """Return a schedule's value after ``step`` steps."""
    try:
        return schedule(step)
    except Exception as error:
        if isinstance(step, Tensor):
            error.add_note(
                f"the schedule of {label} got a step count that torch.func hides: write it with "
                "torch's operations, or pass the value to update"
            )
        else:
            error.add_note(f"raised by the schedule of {label}, after {step:g} steps")
        raise


def _resolve(label: str, kind: Any, value: Any, bound: Interval, step: float | Tensor) -> Any:
    if isinstance(value, Tensor):
        if carries_derivative(value):
            return value.to(torch.float64)
        # It may have been written to. Reading from a device would wait for the device.
        # Its dtype stays, since torch.optim computes in this dtype.
        return _check_number(label, value, bound) if value.is_cpu else value
    if callable(value):
        require_counted(label, value)
        made = _normalize(f"{label} (from its schedule)", kind, _at(value, step - 1, label), bound)
        return _resolve(label, kind, made, bound, step)
    if isinstance(value, tuple):
        kinds = typing.get_args(kind)
        return tuple(
            _resolve(f"{label}[{index}]", one, item, bound, step)
            for index, (one, item) in enumerate(zip(kinds, value, strict=True))
        )
    return value
