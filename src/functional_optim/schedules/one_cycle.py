"""Schedule of one rise, and one fall to far below its start.

With initial = peak / div_factor, final = initial / final_div_factor and r = pct_start steps:

two phases:    initial -> peak at r - 1 -> final at steps - 1
three phases:  initial -> peak at r - 1 -> initial at 2 r - 2 -> final at steps - 1

Smith & Topin 2018 (three linear phases); the two phases and the cosine are those of torch.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from functional_optim.core.format import format_value
from functional_optim.core.schedule_value import (
    Anneal,
    ScheduleValue,
    check_anneal,
    check_finite,
    check_int,
    check_positive,
)
from functional_optim.schedules.arithmetic import ramp, select, since


@dataclass(frozen=True, repr=False)
class OneCycle(ScheduleValue):
    """Schedule that :func:`one_cycle` returns."""

    peak: float
    steps: int
    pct_start: float
    anneal_strategy: Anneal
    div_factor: float
    final_div_factor: float
    three_phase: bool
    maker: ClassVar[str] = "one_cycle"

    def __call__(self, made: Any) -> Any:
        made = since(made)
        initial = self.peak / self.div_factor
        final = initial / self.final_div_factor
        top, end = self.pct_start * self.steps - 1, self.steps - 1

        def phase(start: float, to: float, begin: float, until: float) -> Any:
            return ramp(since(made, begin), start, to, until - begin, self.anneal_strategy)

        def rising() -> Any:
            return phase(initial, self.peak, 0.0, top)

        def falling() -> Any:
            if not self.three_phase:
                return phase(self.peak, final, top, end)
            back = 2 * self.pct_start * self.steps - 2
            return select(
                made,
                back,
                lambda: phase(self.peak, initial, top, back),
                lambda: phase(initial, final, back, end),
            )

        return select(made, top, rising, falling)


def one_cycle(
    peak: float,
    *,
    steps: int,
    pct_start: float = 0.3,
    anneal_strategy: Anneal = "cos",
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
    three_phase: bool = False,
) -> OneCycle:
    """Return a schedule with a rise to ``peak`` and a fall to far below its start: OneCycleLR.

    From ``initial = peak / div_factor`` to ``peak`` at step ``pct_start * steps - 1``, and to
    ``initial / final_div_factor`` at ``steps - 1``, where it stays (torch raises after that). With
    ``three_phase`` it falls to ``initial`` as fast as it rose, before it falls to the last value.

    The opposite cycle that torch has for momentum, from ``high`` to ``low`` and back, is
    ``one_cycle(low, div_factor=low / high, final_div_factor=1.0, ...)``.

    Args:
        peak: a finite number: torch's ``max_lr``.
        steps: a whole number >= 3: torch's ``total_steps``.
        pct_start: part of the steps in the rise, a number > ``1 / steps`` and < 1; with
            ``three_phase``, at most 0.5.
        anneal_strategy: form of each phase: ``"cos"`` or ``"linear"``.
        div_factor: a finite number > 0.
        final_div_factor: a finite number > 0.
        three_phase: True for three phases.

    Returns:
        A schedule.

    Raises:
        TypeError, ValueError: a value outside the bounds above.

    Example::

        >>> lr = one_cycle(0.5, steps=101, pct_start=0.5, div_factor=10.0, anneal_strategy="linear")
        >>> lr(0.0), lr(49.5), lr(100.0)
        (0.05, 0.5, 5e-06)

    Reference:
        Smith & Topin, "Super-convergence: very fast training of neural networks using large
        learning rates", 2018, section 3.
    """
    steps = check_int("one_cycle: steps", steps, 3)
    share = check_finite("one_cycle: pct_start", pct_start)
    if not isinstance(three_phase, bool):
        raise TypeError(
            f"one_cycle: three_phase must be True or False, got {format_value(three_phase)}"
        )
    bound, most = ("<= 0.5 with three_phase", 0.5) if three_phase else ("< 1", 1.0)
    if not 1 < share * steps < steps or share > most:
        raise ValueError(
            f"one_cycle: pct_start must be > 1 / steps (so that the rise has a length) and {bound} "
            f"(so that the fall has one), got {share!r} of {steps} steps"
        )
    return OneCycle(
        check_finite("one_cycle: peak", peak),
        steps,
        share,
        check_anneal("one_cycle: anneal_strategy", anneal_strategy),
        check_positive("one_cycle: div_factor", div_factor),
        check_positive("one_cycle: final_div_factor", final_div_factor),
        three_phase,
    )
