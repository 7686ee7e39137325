"""From one number to another by a power of the steps that are left.

s(n) = to + (start - to) max(1 - n / steps, 0)^power
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from functional_optim.core.schedule_value import ScheduleValue, finite, positive, whole
from functional_optim.schedules.arithmetic import between, since


@dataclass(frozen=True, repr=False)
class Polynomial(ScheduleValue):
    """Made by :func:`polynomial`."""

    start: float
    to: float
    steps: int
    power: float
    maker: ClassVar[str] = "polynomial"

    def __call__(self, made: Any) -> Any:
        rest = (since(self.steps - since(made)) / self.steps) ** self.power
        return between(self.start, self.to, 1.0 - rest, rest)


def polynomial(start: float, *, to: float = 0.0, steps: int, power: float) -> Polynomial:
    """From ``start`` at the first step to ``to``, by a power of the share of steps left.

    ``s(n) = to + (start - to) * max(1 - n / steps, 0)**power``: that of torch's PolynomialLR, with
    ``total_iters = steps``, where ``to`` is 0.

    Args:
        start: a finite number.
        to: the same, reached after ``steps`` steps.
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
        finite("polynomial: start", start),
        finite("polynomial: to", to),
        whole("polynomial: steps", steps, 1),
        positive("polynomial: power", power),
    )
