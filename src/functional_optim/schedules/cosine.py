"""Schedule along half a cosine wave.

s(n) = to + (start - to) (1 + cos(pi min(n / steps, 1))) / 2

Loshchilov & Hutter 2017, equation 5, without restarts. It is computed as the square of a sine:
(1 + cos(pi t)) / 2 = sin(pi (1 - t) / 2)^2, which loses no digits near the end.
"""

from typing import ClassVar

from functional_optim.core.schedule_value import Anneal
from functional_optim.schedules.arithmetic import Ramp


class Cosine(Ramp):
    """Schedule that :func:`cosine` returns."""

    maker: ClassVar[str] = "cosine"
    anneal: ClassVar[Anneal] = "cos"


def cosine(start: float, *, to: float = 0.0, steps: int) -> Cosine:
    """Return a schedule along half a cosine wave, from ``start`` at the first step to ``to``.

    ``s(n) = to + (start - to) * (1 + cos(pi * min(n / steps, 1))) / 2``. Until its minimum it
    equals torch's CosineAnnealingLR with ``T_max = steps`` and ``eta_min = to``.

    Args:
        start: a finite number.
        to: a finite number, the value after ``steps`` steps.
        steps: a whole number >= 1.

    Returns:
        A schedule.

    Raises:
        TypeError, ValueError: a value outside the bounds above.

    Example::

        >>> from functional_optim import adamw
        >>> optimizer = adamw(lr=cosine(0.1, steps=1000))
        >>> optimizer.hyper["lr"]
        cosine(0.1, to=0.0, steps=1000)
        >>> optimizer.hyper["lr"](1000.0)
        0.0

    Reference:
        Loshchilov & Hutter, "SGDR: stochastic gradient descent with warm restarts", ICLR 2017,
        equation 5.
    """
    return Cosine.build(start, to, steps)
