"""Multiplied by the same factor at each step.

s(n) = start gamma^n
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from functional_optim.core.schedule_value import ScheduleValue, finite, positive
from functional_optim.schedules.arithmetic import since


@dataclass(frozen=True, repr=False)
class Exponential(ScheduleValue):
    """Made by :func:`exponential`."""

    start: float
    gamma: float
    maker: ClassVar[str] = "exponential"

    def __call__(self, made: Any) -> Any:
        if self.start == 0.0:
            return 0.0
        try:
            return self.start * self.gamma ** since(made)
        except OverflowError:  # which tensors do not raise: whoever takes the value says so
            return math.copysign(math.inf, self.start)


def exponential(start: float, *, gamma: float) -> Exponential:
    """``start`` at the first step, multiplied by ``gamma`` at each one after it.

    ``s(n) = start * gamma**n``: that of torch's ExponentialLR. To fall by a factor ``f`` in so many
    steps, give ``gamma=f ** (1 / steps)``.

    Args:
        start: a finite number.
        gamma: a finite number > 0; below 1 it falls, above 1 it rises.

    Returns:
        A schedule.

    Raises:
        TypeError, ValueError: a value outside the bounds above.

    Example::

        >>> exponential(1.0, gamma=0.5)(3.0)
        0.125
    """
    return Exponential(finite("exponential: start", start), positive("exponential: gamma", gamma))
