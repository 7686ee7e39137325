"""Schedule with a power of the remaining steps.

s(n) = to + (start - to) max(1 - n / steps, 0)^power
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from functional_optim.core.schedule_value import (
    ScheduleValue,
    check_finite,
    check_int,
    check_positive,
)
from functional_optim.schedules.arithmetic import between, since


@dataclass(frozen=True, repr=False)
class Polynomial(ScheduleValue):
    """Schedule that :func:`polynomial` returns."""

    start: float
    to: float
    steps: int
    power: float
    maker: ClassVar[str] = "polynomial"

    def __call__(self, made: Any) -> Any:
        rest = (since(self.steps - since(made)) / self.steps) ** self.power
        return between(self.start, self.to, 1.0 - rest, rest)


def polynomial(start: float, *, to: float = 0.0, steps: int, power: float) -> Polynomial:
    """Return a schedule from ``start`` to ``to``, with a power of the part of remaining steps.

    ``s(n) = to + (start - to) * max(1 - n / steps, 0)**power``. With ``to = 0`` it equals torch's
    PolynomialLR with ``total_iters = steps``.

    Args:
        start: a finite number.
        to: a finite number, the value after ``steps`` steps.
        steps: a whole number >= 1.
        power: a finite number > 0; 1 is :func:`linear`.

    Returns:
        A schedule.

    Raises:
        TypeError, ValueError: a value outside the bounds above.

    Example::

        >>> polynomial(0.5, steps=4, power=2.0)(2.0)
        0.125
    """
    return Polynomial(
        check_finite("polynomial: start", start),
        check_finite("polynomial: to", to),
        check_int("polynomial: steps", steps, 1),
        check_positive("polynomial: power", power),
    )
