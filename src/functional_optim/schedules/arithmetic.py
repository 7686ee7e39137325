"""Arithmetic of schedules, for a step count that is a number or a 0-d tensor.

Both have the same formulas. A condition on the count is an ``if`` for a number, and ``torch.where``
for a tensor, whose value may be hidden. The argument ``made`` is the number of steps made.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from functional_optim.core.schedule_value import Anneal, ScheduleValue, check_finite, check_int
from functional_optim.numeric import beside


def since(made: Any, start: float = 0.0) -> Any:
    """Return ``max(made - start, 0)`` in double precision."""
    if isinstance(made, Tensor):
        return torch.clamp(made.to(torch.float64) - start, min=0.0)
    return max(float(made) - start, 0.0)


def root_at(schedule: Callable[[Any], Any], made: Any) -> Any:
    """Return the square root of a schedule's value."""
    return schedule(made) ** 0.5


def select(made: Any, boundary: float, before: Callable[[], Any], later: Callable[[], Any]) -> Any:
    """Return ``before()`` if ``made < boundary``, else ``later()``."""
    if isinstance(made, Tensor):
        return torch.where(made < boundary, beside(made, before()), beside(made, later()))
    return before() if made < boundary else later()


def ramp(made: Any, start: Any, to: Any, steps: float, anneal: Anneal = "linear") -> Any:
    """Return the value of a ramp from ``start`` at 0 to ``to`` at ``steps`` and later.

    It is exact at both ends, and never outside of them. The weights of both ends are computed
    separately, so that the relative error is small even near 0.
    """
    made = since(made)
    share, rest = made / steps, since(steps - made) / steps
    share = torch.clamp(share, max=1.0) if isinstance(share, Tensor) else min(share, 1.0)
    if anneal == "cos":
        share, rest = _sine_squared(share), _sine_squared(rest)
    return between(start, to, share, rest)


def _sine_squared(share: Any) -> Any:
    """Return the squared sine of a part of a right angle: exactly 0 at 0, and 1 at 1."""
    angle = share * (math.pi / 2)
    sine = torch.sin(angle) if isinstance(angle, Tensor) else math.sin(angle)
    return sine * sine


def between(start: Any, to: Any, share: Any, rest: Any) -> Any:
    """Return ``rest * start + share * to``, for weights with the sum 1."""
    value = start * rest + to * share
    if not isinstance(value, Tensor):
        return min(max(value, min(start, to)), max(start, to))
    ends = beside(value, start), beside(value, to)
    return torch.minimum(torch.maximum(value, torch.minimum(*ends)), torch.maximum(*ends))


@dataclass(frozen=True, repr=False)
class Ramp(ScheduleValue):
    """Base class of linear and cosine schedules."""

    start: float
    to: float
    steps: int
    anneal: ClassVar[Anneal]
    """The form of the ramp from ``start`` to ``to``."""

    def __call__(self, made: Any) -> Any:
        return ramp(made, self.start, self.to, self.steps, self.anneal)

    @classmethod
    def build(cls, start: Any, to: Any, steps: Any) -> Self:
        """Check the arguments, and return a schedule.

        Raises:
            TypeError, ValueError: ``start`` or ``to`` is not a finite number, or ``steps`` is not a
                whole number >= 1.
        """
        name = cls.maker
        return cls(
            check_finite(f"{name}: start", start),
            check_finite(f"{name}: to", to),
            check_int(f"{name}: steps", steps, 1),
        )
