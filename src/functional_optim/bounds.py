"""Intervals of allowed hyper-parameters, and the sentence about them in errors."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Interval:
    """An interval of the real line. NaN is in none.

    Args:
        low: lower end.
        high: upper end.
        low_open: whether ``low`` itself is refused.
        high_open: whether ``high`` itself is refused.
        finite: whether infinities are refused, whatever the ends say.

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
        # torch.compile traces comparisons of a number that changes, and no functions of it.
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
UNIT = Interval(low=0.0, high=1.0)
BELOW_ONE = Interval(low=0.0, high=1.0, high_open=True)
