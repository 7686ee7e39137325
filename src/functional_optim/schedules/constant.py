"""Schedule with one value for every step.

s(n) = value
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from functional_optim.core.schedule_value import ScheduleValue, check_finite


@dataclass(frozen=True, repr=False)
class Constant(ScheduleValue):
    """Schedule that :func:`constant` returns."""

    value: float
    maker: ClassVar[str] = "constant"

    def __call__(self, made: Any) -> float:
        return self.value


def constant(value: float) -> Constant:
    """Return a schedule with one value for all steps, as a part of ``joined``.

    ``s(n) = value``

    Args:
        value: a finite number.

    Returns:
        A schedule.

    Raises:
        TypeError, ValueError: a value that is not a finite number.

    Example::

        >>> from functional_optim import joined
        >>> halved_at_100 = joined([constant(0.1), constant(0.05)], [100])
        >>> halved_at_100(99.0), halved_at_100(100.0)
        (0.1, 0.05)
    """
    return Constant(check_finite("constant: value", value))
