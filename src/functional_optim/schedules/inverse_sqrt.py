"""In inverse proportion to the root of the step count.

s(n) = start sqrt(steps / (steps + n))

Vaswani et al. 2017, equation 3, from the end of its warm-up on, where n counts from there.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from functional_optim.core.schedule_value import ScheduleValue, finite, whole
from functional_optim.schedules.arithmetic import since


@dataclass(frozen=True, repr=False)
class InverseSqrt(ScheduleValue):
    """Made by :func:`inverse_sqrt`."""

    start: float
    steps: int
    maker: ClassVar[str] = "inverse_sqrt"

    def __call__(self, made: Any) -> Any:
        share = self.steps / (self.steps + since(made))
        return self.start * (torch.sqrt(share) if isinstance(share, Tensor) else math.sqrt(share))


def inverse_sqrt(start: float, *, steps: int) -> InverseSqrt:
    """``start`` at the first step, then falling as ``1 / sqrt(step)`` does; it has no end.

    ``s(n) = start * sqrt(steps / (steps + n))``. After a warm-up of as many steps,
    ``warmup(k, then=inverse_sqrt(peak, steps=k))``, it is ``peak * sqrt(k / step)``.

    Args:
        start: a finite number.
        steps: a whole number >= 1: when it has fallen to ``start / sqrt(2)``.

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
    return InverseSqrt(finite("inverse_sqrt: start", start), whole("inverse_sqrt: steps", steps, 1))
