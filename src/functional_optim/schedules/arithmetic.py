"""Arithmetic of schedules, on a step count that is a number or a 0-d tensor.

What depends on the count is the same formula for both; a choice by the count is Python's for a
number, and ``torch.where`` for a tensor, whose number may be hidden.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.schedule_value import Anneal
from functional_optim.numeric import beside


def since(made: Any, start: float = 0.0) -> Any:
    """Return the steps made after the first ``start``, 0 at least, in double precision."""
    if isinstance(made, Tensor):
        return torch.clamp(made.to(torch.float64) - start, min=0.0)
    return max(float(made) - start, 0.0)


def root_at(schedule: Callable[[Any], Any], made: Any) -> Any:
    """Return the square root of a schedule's value."""
    return schedule(made) ** 0.5


def select(made: Any, boundary: float, before: Callable[[], Any], later: Callable[[], Any]) -> Any:
    """``before()`` while fewer than ``boundary`` steps are made, then ``later()``."""
    if isinstance(made, Tensor):
        return torch.where(made < boundary, beside(made, before()), beside(made, later()))
    return before() if made < boundary else later()


def ramp(made: Any, start: Any, to: Any, steps: float, anneal: Anneal = "linear") -> Any:
    """From ``start`` at 0 to ``to`` at ``steps`` and after: exact at both, and never outside them.

    The shares of both are computed each by itself, so that a value close to 0 is as exact, in
    proportion, as any other.
    """
    made = since(made)
    share, rest = made / steps, since(steps - made) / steps
    share = torch.clamp(share, max=1.0) if isinstance(share, Tensor) else min(share, 1.0)
    if anneal == "cos":
        share, rest = _sine_squared(share), _sine_squared(rest)
    return between(start, to, share, rest)


def _sine_squared(share: Any) -> Any:
    """Return the squared sine of a share of a right angle: 0 at 0 and 1 at 1, exactly."""
    angle = share * (math.pi / 2)
    sine = torch.sin(angle) if isinstance(angle, Tensor) else math.sin(angle)
    return sine * sine


def between(start: Any, to: Any, share: Any, rest: Any) -> Any:
    """``rest * start + share * to``, for shares that add up to 1."""
    value = start * rest + to * share
    if not isinstance(value, Tensor):
        return min(max(value, min(start, to)), max(start, to))
    ends = beside(value, start), beside(value, to)
    return torch.minimum(torch.maximum(value, torch.minimum(*ends)), torch.maximum(*ends))
