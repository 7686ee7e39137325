"""Linear schedule.

s(n) = start + (to - start) min(n / steps, 1)
"""

from typing import ClassVar

from functional_optim.core.schedule_value import Anneal
from functional_optim.schedules.arithmetic import Ramp


class Linear(Ramp):
    """Schedule that :func:`linear` returns."""

    maker: ClassVar[str] = "linear"
    anneal: ClassVar[Anneal] = "linear"


def linear(start: float, *, to: float, steps: int) -> Linear:
    """Return a linear schedule from ``start`` at the first step to ``to``, where it stays.

    ``s(n) = start + (to - start) * min(n / steps, 1)``, as in torch's LinearLR with
    ``start = lr * start_factor`` and ``to = lr * end_factor``.

    Args:
        start: a finite number.
        to: a finite number, the value after ``steps`` steps.
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
    return Linear.build(start, to, steps)
