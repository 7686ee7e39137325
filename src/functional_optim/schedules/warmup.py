"""Linear warm-up before another schedule.

s(n) = start + (then(0) - start) n / steps for n < steps, else then(n - steps)

Goyal et al. 2017, section 2.2 (gradual warm-up).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from functional_optim.core.schedule_value import (
    ScheduleValue,
    check_finite,
    check_int,
    check_schedule,
)
from functional_optim.schedules.arithmetic import ramp, select, since


@dataclass(frozen=True, repr=False)
class Warmup(ScheduleValue):
    """Schedule that :func:`warmup` returns."""

    steps: int
    then: Callable[[Any], Any]
    start: float
    maker: ClassVar[str] = "warmup"

    def __call__(self, made: Any) -> Any:
        made = since(made)
        if self.steps == 0:
            return self.then(made)
        begun = torch.zeros_like(made) if isinstance(made, Tensor) else 0.0
        return select(
            made,
            self.steps,
            lambda: ramp(made, self.start, self.then(begun), self.steps),
            lambda: self.then(since(made, self.steps)),
        )


def warmup(steps: int, *, then: Callable[[Any], Any], start: float = 0.0) -> Warmup:
    """Return a linear rise to the start of a schedule, and then that schedule.

    ``s(n) = start + (then(0) - start) * n / steps`` for ``n < steps``, else ``then(n - steps)``.
    The first step uses ``start``. With the default 0 it changes nothing.

    Args:
        steps: number of steps before ``then`` starts, a whole number >= 0.
        then: a schedule of this package, or a function of the step count. If a step is traced or
            captured, it is computed at each step, and must consist of torch's operations.
        start: a finite number, the value at the first step.

    Returns:
        A schedule. It can be hashed, compared and pickled if ``then`` can.

    Raises:
        TypeError, ValueError: a value outside the bounds above.

    Example::

        >>> from functional_optim import cosine
        >>> lr = warmup(100, then=cosine(0.2, steps=900))
        >>> lr(0.0), lr(50.0), lr(100.0), lr(1000.0)
        (0.0, 0.1, 0.2, 0.0)

    Reference:
        Goyal et al., "Accurate, large minibatch SGD: training ImageNet in 1 hour", 2017,
        section 2.2.
    """
    return Warmup(
        check_int("warmup: steps", steps, 0),
        check_schedule("warmup: then", then),
        check_finite("warmup: start", start),
    )
