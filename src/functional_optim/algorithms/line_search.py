"""Line search for the strong Wolfe conditions: Nocedal & Wright 2006, algorithms 3.5 and 3.6.

Along the line ``phi(t) = f(x + t d)``, a step ``t`` is accepted if

    phi(t) <= phi(0) + c1 t phi'(0)        (sufficient decrease)
    |phi'(t)| <= c2 |phi'(0)|              (curvature)

with ``c1 = 1e-4`` and ``c2 = 0.9``, their values for quasi-Newton methods. New trial steps are
minimizers of the cubic through two values and slopes (equation 3.59).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

C1 = 1e-4
C2 = 0.9

SMALLEST = 1e-9
"""The search ends when the bracket, times the largest magnitude in the direction, is smaller.

torch.optim.LBFGS has the same number, whatever its ``tolerance_change``.
"""
GROWTH = 10
"""A trial step is at most this many times the one before it."""
MARGIN = 0.1
"""Least distance of a trial step from the ends of the bracket, relative to the bracket, if progress
is slow."""


class Trial(NamedTuple):
    """Point on the line."""

    t: Any  # float or 0-d tensor: the step
    loss: float  # phi(t)
    grad: Tensor  # gradient of f there, a flat vector
    slope: Tensor  # phi'(t), 0-d


def strong_wolfe(
    evaluate: Callable[[Any], Trial], start: Trial, t: Any, size: Tensor, *, limit: int
) -> tuple[Trial, int]:
    """Return a step that fulfils the strong Wolfe conditions, and the number of evaluations.

    ``evaluate`` returns the trial of a step, ``start`` is the trial of ``t = 0``, and ``size`` is
    the largest magnitude in the direction. If no step fulfils the conditions within ``limit``
    iterations, return the best one in the last bracket.
    """
    ends, count = _bracket(evaluate, start, t, limit)
    if len(ends) == 1:
        return ends[0], 1 + count
    low = _lower(ends)
    is_slow = False
    while count < limit and not abs(ends[1].t - ends[0].t) * size < SMALLEST:
        t, is_slow = _away_from_ends(cubic_minimizer(ends[0], ends[1]), ends, is_slow=is_slow)
        trial = evaluate(t)
        count += 1
        if not _decreases(start, trial) or trial.loss >= ends[low].loss:
            ends[1 - low] = trial
            low = _lower(ends)
            continue
        is_found = _is_flat(start, trial)
        if not is_found and trial.slope * (ends[1 - low].t - ends[low].t) >= 0:
            ends[1 - low] = ends[low]
        ends[low] = trial
        if is_found:
            break
    return ends[low], 1 + count


def _bracket(
    evaluate: Callable[[Any], Trial], start: Trial, t: Any, limit: int
) -> tuple[list[Trial], int]:
    """Return a trial that fulfils both conditions, or two around such a step; and iterations."""
    before, trial = start, evaluate(t)
    for count in range(max(limit, 0)):
        if not _decreases(start, trial) or (count > 1 and trial.loss >= before.loss):
            return [before, trial], count
        if _is_flat(start, trial):
            return [trial], count
        if trial.slope >= 0:
            return [before, trial], count
        least = trial.t + 0.01 * (trial.t - before.t)
        t = cubic_minimizer(before, trial, (least, trial.t * GROWTH))
        before, trial = trial, evaluate(t)
    return [start, trial], max(limit, 0)


def _decreases(start: Trial, trial: Trial) -> bool:
    """Return True unless the loss is above the line of sufficient decrease; NaN is not above."""
    return not trial.loss > (start.loss + C1 * trial.t * start.slope)


def _is_flat(start: Trial, trial: Trial) -> bool:
    """Return True if the slope fulfils the curvature condition."""
    return bool(abs(trial.slope) <= -C2 * start.slope)


def _lower(ends: list[Trial]) -> int:
    """Return the index of the end with the lower loss."""
    return 0 if ends[0].loss <= ends[1].loss else 1


def _away_from_ends(t: Any, ends: list[Trial], *, is_slow: bool) -> tuple[Any, bool]:
    """Move a trial step away from the nearer end of the bracket, if it was near one twice."""
    lower, upper = min(ends[0].t, ends[1].t), max(ends[0].t, ends[1].t)
    margin = MARGIN * (upper - lower)
    if not min(upper - t, t - lower) < margin:
        return t, False
    if not (is_slow or t >= upper or t <= lower):
        return t, True
    return (upper - margin if abs(t - upper) < abs(t - lower) else lower + margin), False


def cubic_minimizer(one: Trial, other: Trial, bounds: tuple[Any, Any] | None = None) -> Any:
    """Return the minimizer of the cubic with the values and slopes of two trials.

    ``t = b - (b - a) (phi'(b) + d2 - d1) / (phi'(b) - phi'(a) + 2 d2)`` for ``a <= b``, with
    ``d1 = phi'(a) + phi'(b) - 3 (phi(a) - phi(b)) / (a - b)`` and
    ``d2 = sqrt(d1^2 - phi'(a) phi'(b))``; the middle of the bounds if the cubic has no minimizer.
    """
    a, b = (one, other) if one.t <= other.t else (other, one)
    least, most = (a.t, b.t) if bounds is None else bounds
    d1 = a.slope + b.slope - 3 * (a.loss - b.loss) / (a.t - b.t)
    square = d1**2 - a.slope * b.slope
    if not square >= 0:
        return (least + most) / 2.0
    d2 = square.sqrt()
    t = b.t - (b.t - a.t) * ((b.slope + d2 - d1) / (b.slope - a.slope + 2 * d2))
    return min(max(t, least), most)
