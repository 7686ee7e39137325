"""Base class of schedules: frozen records that are called with a step count.

A schedule ``s`` returns ``s(made)`` for the number of steps made so far, which is 0 in the first
step. The result is a Python number for a number. For a 0-d tensor it is a 0-d float64 tensor, or a
number if the schedule is constant. It is computed by torch's operations without branches, for
torch.func, torch.compile, torch.export and CUDA graphs. Negative counts count as 0.
"""

import math
from abc import ABC, abstractmethod
from numbers import Real
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from functional_optim.core.format import format_value, function_name

Anneal = Literal["linear", "cos"]
"""Interpolation between two values: linear, or along half a period of a cosine."""


class ScheduleValue(ABC):
    """Schedule whose ``repr`` is the call that builds it. Subclasses are frozen dataclasses."""

    maker: ClassVar[str]
    """The name of the function that builds the schedule."""

    def __init_subclass__(cls) -> None:
        """Let torch.load read schedules with its safe defaults, since they run no code."""
        torch.serialization.add_safe_globals([cls])

    @abstractmethod
    def __call__(self, made: Any) -> Any:
        """Return the value after ``made`` steps."""

    def __repr__(self) -> str:
        (_, first), *rest = vars(self).items()
        parts = [format_part(first), *(f"{name}={format_part(value)}" for name, value in rest)]
        return f"{self.maker}({', '.join(parts)})"


def format_part(value: Any) -> str:
    """Format an argument of a schedule: a schedule by its ``repr``, a function by its name."""
    if isinstance(value, (ScheduleValue, float)):
        return repr(value)
    return function_name(value) if callable(value) else format_value(value)


def check_finite(label: str, value: Any) -> float:
    """Return a finite number as a float, or raise TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, Real):
        way_out = (
            ": a schedule is made of numbers; to differentiate by one, write a function of the step"
            if isinstance(value, Tensor)
            else ""
        )
        raise TypeError(f"{label} must be a number, got {format_value(value)}{way_out}")
    try:
        number = float(value)
    except OverflowError:  # a whole number beyond the largest float
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{label} must be a finite number, got {format_value(value)}")
    return number


def check_positive(label: str, value: Any) -> float:
    """Return a finite number > 0 as a float, or raise TypeError or ValueError."""
    number = check_finite(label, value)
    if number <= 0:
        raise ValueError(f"{label} must be a finite number > 0, got {number!r}")
    return number


def check_int(label: str, value: Any, least: int) -> int:
    """Return an int >= ``least``, or raise TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{label} must be a whole number >= {least}, got {format_value(value)}")
    if value < least:
        raise ValueError(f"{label} must be a whole number >= {least}, got {value}")
    return value


def check_anneal(label: str, value: Any) -> Anneal:
    """Return "cos" or "linear", or raise ValueError."""
    if value == "cos":
        return "cos"
    if value == "linear":
        return "linear"
    raise ValueError(f"{label} must be 'cos' or 'linear', got {format_value(value)}")


def check_schedule(label: str, value: Any) -> Any:
    """Return a schedule or function; raise TypeError for others, and for global schedules."""
    if getattr(value, "maker", None) == "on_global_step":
        raise TypeError(
            f"{label} counts the optimizer's steps, got {value!r}: mark the whole schedule, "
            "on_global_step(...), and none of its parts"
        )
    if callable(value) and not isinstance(value, (Tensor, type)):
        return value
    raise TypeError(
        f"{label} must be a schedule, such as cosine(0.1, steps=1000), got {format_value(value)}; "
        "for the same number at every step write constant(number)"
    )
