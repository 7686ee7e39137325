"""Base class of schedules: frozen records that are called with a step count.

A schedule ``s`` gives ``s(made)`` for a number of steps made, 0 at the first step: a Python number
for a number, and for a 0-d tensor a 0-d tensor of double precision (or a number where it is the
same at every step), by torch's operations and without a branch on the count, so that torch.func,
torch.compile, torch.export and CUDA graphs go through it. Negative counts count as 0.
"""

import math
from abc import ABC, abstractmethod
from numbers import Real
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from functional_optim.core.brief import brief, named

Anneal = Literal["linear", "cos"]
"""The way from one value to another: in a straight line, or along half a wave of a cosine."""


class ScheduleValue(ABC):
    """A schedule with a true ``repr``: the call that made it. Subclasses are frozen dataclasses."""

    maker: ClassVar[str]
    """The name of the function that makes it."""

    def __init_subclass__(cls) -> None:
        """torch.load reads it with its safe defaults: a record of numbers, which runs no code."""
        torch.serialization.add_safe_globals([cls])

    @abstractmethod
    def __call__(self, made: Any) -> Any:
        """The value after ``made`` steps."""

    def __repr__(self) -> str:
        (_, first), *rest = vars(self).items()
        parts = [written(first), *(f"{name}={written(value)}" for name, value in rest)]
        return f"{self.maker}({', '.join(parts)})"


def written(value: Any) -> str:
    """A part of a schedule as one reads it: another schedule whole, a function by its name."""
    if isinstance(value, (ScheduleValue, float)):
        return repr(value)
    return named(value) if callable(value) else brief(value)


def finite(label: str, value: Any) -> float:
    """A finite number, as a float.

    Raises:
        TypeError: it is no number.
        ValueError: it is not finite.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        way_out = (
            ": a schedule is made of numbers; to differentiate by one, write a function of the step"
            if isinstance(value, Tensor)
            else ""
        )
        raise TypeError(f"{label} must be a number, got {brief(value)}{way_out}")
    try:
        number = float(value)
    except OverflowError:  # a whole number beyond the largest float
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{label} must be a finite number, got {brief(value)}")
    return number


def positive(label: str, value: Any) -> float:
    """A finite number > 0, as a float.

    Raises:
        TypeError: it is no number.
        ValueError: it is not finite, or not > 0.
    """
    number = finite(label, value)
    if number <= 0:
        raise ValueError(f"{label} must be a finite number > 0, got {number!r}")
    return number


def whole(label: str, value: Any, least: int) -> int:
    """A whole number >= ``least``.

    Raises:
        TypeError: it is no int.
        ValueError: it is smaller.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{label} must be a whole number >= {least}, got {brief(value)}")
    if value < least:
        raise ValueError(f"{label} must be a whole number >= {least}, got {value}")
    return value


def annealed(label: str, value: Any) -> Anneal:
    """Return the function of an annealing strategy.

    Raises:
        ValueError: it is neither.
    """
    if value == "cos":
        return "cos"
    if value == "linear":
        return "linear"
    raise ValueError(f"{label} must be 'cos' or 'linear', got {brief(value)}")


def function(label: str, value: Any) -> Any:
    """A schedule: one of this package, or any function of the steps made.

    Raises:
        TypeError: it cannot be called.
    """
    if getattr(value, "maker", None) == "on_global_step":
        raise TypeError(
            f"{label} counts the optimizer's steps, got {value!r}: mark the whole schedule, "
            "on_global_step(...), and none of its parts"
        )
    if callable(value) and not isinstance(value, (Tensor, type)):
        return value
    raise TypeError(
        f"{label} must be a schedule, such as cosine(0.1, steps=1000), got {brief(value)}; for the "
        "same number at every step write constant(number)"
    )
