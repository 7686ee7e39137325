"""Schedule that is inversely proportional to the root of the step count.

s(n) = start sqrt(steps / (steps + n))

Vaswani et al. 2017, equation 3, after its warm-up, where n counts from the end of the warm-up.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from functional_optim.core.schedule_value import ScheduleValue, check_finite, check_int
from functional_optim.schedules.arithmetic import since


@dataclass(frozen=True, repr=False)
class InverseSqrt(ScheduleValue):
    """Schedule that :func:`inverse_sqrt` returns."""

    start: float
    steps: int
    maker: ClassVar[str] = "inverse_sqrt"

    def __call__(self, made: Any) -> Any:
        share = self.steps / (self.steps + since(made))
        return self.start * (torch.sqrt(share) if isinstance(share, Tensor) else math.sqrt(share))


def inverse_sqrt(start: float, *, steps: int) -> InverseSqrt:
    """Return a schedule that starts at ``start`` and falls like ``1 / sqrt(step)``, without end.

    ``s(n) = start * sqrt(steps / (steps + n))``. After a warm-up of the same number of steps,
    ``warmup(k, then=inverse_sqrt(peak, steps=k))``, it is ``peak * sqrt(k / step)``.

    Args:
        start: a finite number.
        steps: number of steps until the value is ``start / sqrt(2)``, a whole number >= 1.

    Returns:
        A schedule.

    Raises:
        TypeError, ValueError: a value outside the bounds above.

    Example::

        >>> inverse_sqrt(0.5, steps=100)(300.0)
        0.25

    Reference:
        Vaswani et al., "Attention is all you need", NeurIPS 2017, equation 3.
    """
    return InverseSqrt(
        check_finite("inverse_sqrt: start", start), check_int("inverse_sqrt: steps", steps, 1)
    )
