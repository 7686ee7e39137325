"""Intervals of allowed hyper-parameters, as text for errors too, and a check of names."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Interval:
    """Interval of the real line. No interval contains NaN.

    Args:
        low: lower end.
        high: upper end.
        low_open: True if ``low`` itself is excluded.
        high_open: True if ``high`` itself is excluded.
        finite: True if infinities are excluded, whatever the ends are.

    Example::

        >>> 1.0 in Interval(low=0.0, high=1.0, high_open=True)
        False
        >>> print(Interval(low=0.0, high=1.0, high_open=True))
        a number >= 0 and < 1
    """

    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False
    finite: bool = False

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        # For a number that changes, torch.compile traces comparisons, but not math.isfinite.
        return above and below and (not self.finite or -math.inf < value < math.inf)

    def __str__(self) -> str:
        kind = "a finite number" if self.finite else "a number"
        ends = []
        if self.low > -math.inf:
            ends.append(f"{'>' if self.low_open else '>='} {self.low:g}")
        if self.high < math.inf:
            ends.append(f"{'<' if self.high_open else '<='} {self.high:g}")
        return f"{kind} {' and '.join(ends)}".strip() if ends else f"{kind}, not NaN"


ANY = Interval()
NON_NEGATIVE = Interval(low=0.0)
FINITE_NON_NEGATIVE = Interval(low=0.0, finite=True)
POSITIVE = Interval(low=0.0, low_open=True)
FINITE_POSITIVE = Interval(low=0.0, low_open=True, finite=True)
UNIT = Interval(low=0.0, high=1.0)
BELOW_ONE = Interval(low=0.0, high=1.0, high_open=True)


def check_choice(stage: str, field: str, value: str | None, allowed: Sequence[str | None]) -> None:
    """Raise ValueError if a hyper-parameter is not one of the allowed names."""
    if value not in allowed:
        raise ValueError(
            f"{stage}: {field} must be one of {', '.join(map(repr, allowed))}, got {value!r}"
        )
