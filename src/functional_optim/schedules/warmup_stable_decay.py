"""A rise, a long time at the peak, and a fall.

s(n) = start + (peak - start) n / warmup           for n < warmup
s(n) = peak                                         for n < warmup + stable
s(n) = the way from peak to ``to``, in ``decay`` steps   after

Hu et al. 2024, section 4 (MiniCPM).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from functional_optim.core.schedule_value import Anneal, ScheduleValue, annealed, finite, whole
from functional_optim.schedules.arithmetic import ramp, select, since


@dataclass(frozen=True, repr=False)
class WarmupStableDecay(ScheduleValue):
    """Made by :func:`warmup_stable_decay`."""

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
    """A rise to ``peak``, ``stable`` steps there, and a fall to ``to``, where it stays.

    ``s(n) = start + (peak - start) * n / warmup`` for ``n < warmup``, then ``peak``, and from step
    ``warmup + stable`` on :func:`linear` or :func:`cosine` from ``peak`` to ``to``. A run can be
    made longer at the peak without knowing its length beforehand.

    Args:
        peak: a finite number.
        warmup: a whole number >= 0 of steps.
        stable: the same.
        decay: a whole number >= 1 of steps.
        start: a finite number: the value at the first step.
        to: the same: the last value.
        anneal_strategy: the form of the fall: ``"linear"`` or ``"cos"``.

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
        finite("warmup_stable_decay: peak", peak),
        whole("warmup_stable_decay: warmup", warmup, 0),
        whole("warmup_stable_decay: stable", stable, 0),
        whole("warmup_stable_decay: decay", decay, 1),
        finite("warmup_stable_decay: start", start),
        finite("warmup_stable_decay: to", to),
        annealed("warmup_stable_decay: anneal_strategy", anneal_strategy),
    )
