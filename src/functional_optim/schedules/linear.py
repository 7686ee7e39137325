"""In a straight line from one number to another.

s(n) = start + (to - start) min(n / steps, 1)
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from functional_optim.schedules.arithmetic import ramp
from functional_optim.schedules.value import ScheduleValue, finite, whole


@dataclass(frozen=True, repr=False)
class Linear(ScheduleValue):
    """Made by :func:`linear`."""

    start: float
    to: float
    steps: int
    maker: ClassVar[str] = "linear"

    def __call__(self, made: Any) -> Any:
        return ramp(made, self.start, self.to, self.steps)


def linear(start: float, *, to: float, steps: int) -> Linear:
    """In a straight line from ``start`` at the first step to ``to``, where it stays.

    ``s(n) = start + (to - start) * min(n / steps, 1)``: that of torch's LinearLR, with
    ``start = lr * start_factor`` and ``to = lr * end_factor``.

    Args:
        start: a finite number.
        to: the same, reached after ``steps`` steps.
        steps: a whole number >= 1.

    Returns:
        A schedule.

    Raises:
        TypeError, ValueError: a value outside the bounds above.

    Example::

        >>> falling = linear(0.1, to=0.0, steps=4)
        >>> falling(0.0), falling(2.0), falling(9.0)
        (0.1, 0.05, 0.0)
    """
    return Linear(
        finite("linear: start", start), finite("linear: to", to), whole("linear: steps", steps, 1)
    )
