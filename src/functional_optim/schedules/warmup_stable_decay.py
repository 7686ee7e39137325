"""Schedule of a rise, many steps at the peak, and a fall.

s(n) = start + (peak - start) n / warmup                   for n < warmup
s(n) = peak                                                for n < warmup + stable
s(n) = linear or cosine from peak to ``to``, in ``decay`` steps   after

Hu et al. 2024, section 4 (MiniCPM).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from functional_optim.core.schedule_value import (
    Anneal,
    ScheduleValue,
    check_anneal,
    check_finite,
    check_int,
)
from functional_optim.schedules.arithmetic import ramp, select, since


@dataclass(frozen=True, repr=False)
class WarmupStableDecay(ScheduleValue):
    """Schedule that :func:`warmup_stable_decay` returns."""

    peak: float
    warmup: int
    stable: int
    decay: int
    start: float
    to: float
    anneal_strategy: Anneal
    maker: ClassVar[str] = "warmup_stable_decay"

    def __call__(self, made: Any) -> Any:
        made = since(made)
        falling = ramp(
            since(made, self.warmup + self.stable),
            self.peak,
            self.to,
            self.decay,
            self.anneal_strategy,
        )
        if self.warmup == 0:
            return falling
        return select(
            made,
            self.warmup,
            lambda: ramp(made, self.start, self.peak, self.warmup),
            lambda: falling,
        )


def warmup_stable_decay(
    peak: float,
    *,
    warmup: int,
    stable: int,
    decay: int,
    start: float = 0.0,
    to: float = 0.0,
    anneal_strategy: Anneal = "linear",
) -> WarmupStableDecay:
    """Return a rise to ``peak``, ``stable`` steps at ``peak``, and a fall to ``to``.

    ``s(n) = start + (peak - start) * n / warmup`` for ``n < warmup``, then ``peak``, and from step
    ``warmup + stable`` on :func:`linear` or :func:`cosine` from ``peak`` to ``to``. The phase at
    the peak can be extended during a run.

    Args:
        peak: a finite number.
        warmup: number of steps of the rise, a whole number >= 0.
        stable: number of steps at the peak, a whole number >= 0.
        decay: number of steps of the fall, a whole number >= 1.
        start: a finite number, the value at the first step.
        to: a finite number, the last value.
        anneal_strategy: form of the fall: ``"linear"`` or ``"cos"``.

    Returns:
        A schedule.

    Raises:
        TypeError, ValueError: a value outside the bounds above.

    Example::

        >>> lr = warmup_stable_decay(0.2, warmup=10, stable=100, decay=20)
        >>> lr(5.0), lr(10.0), lr(110.0), lr(120.0), lr(130.0)
        (0.1, 0.2, 0.2, 0.1, 0.0)

    Reference:
        Hu et al., "MiniCPM: unveiling the potential of small language models with scalable
        training strategies", 2024, section 4.
    """
    return WarmupStableDecay(
        check_finite("warmup_stable_decay: peak", peak),
        check_int("warmup_stable_decay: warmup", warmup, 0),
        check_int("warmup_stable_decay: stable", stable, 0),
        check_int("warmup_stable_decay: decay", decay, 1),
        check_finite("warmup_stable_decay: start", start),
        check_finite("warmup_stable_decay: to", to),
        check_anneal("warmup_stable_decay: anneal_strategy", anneal_strategy),
    )
