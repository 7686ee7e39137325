"""Schedule that is multiplied by the same factor at each step.

s(n) = start gamma^n
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from functional_optim.core.schedule_value import ScheduleValue, check_finite, check_positive
from functional_optim.schedules.arithmetic import since


@dataclass(frozen=True, repr=False)
class Exponential(ScheduleValue):
    """Schedule that :func:`exponential` returns."""

    start: float
    gamma: float
    maker: ClassVar[str] = "exponential"

    def __call__(self, made: Any) -> Any:
        if self.start == 0.0:
            return 0.0
        try:
            return self.start * self.gamma ** since(made)
        except OverflowError:  # tensors give infinity, and the check of the value reports it
            return math.copysign(math.inf, self.start)


def exponential(start: float, *, gamma: float) -> Exponential:
    """Return a schedule with ``start`` at the first step, multiplied by ``gamma`` at each step.

    ``s(n) = start * gamma**n``, as in torch's ExponentialLR. For a factor ``f`` after a number of
    steps, pass ``gamma=f ** (1 / steps)``.

    Args:
        start: a finite number.
        gamma: a finite number > 0. Below 1 the value falls, above 1 it rises.

    Returns:
        A schedule.

    Raises:
        TypeError, ValueError: a value outside the bounds above.

    Example::

        >>> exponential(1.0, gamma=0.5)(3.0)
        0.125
    """
    return Exponential(
        check_finite("exponential: start", start), check_positive("exponential: gamma", gamma)
    )
