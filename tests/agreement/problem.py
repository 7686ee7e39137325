"""The fixed problem for comparisons: random parameters and gradients with a fixed seed."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

STEPS = (1, 5, 50)
"""Numbers of steps after which parameters are compared."""
DTYPES = (torch.float64, torch.float32)
SHAPES = {"all": ((9,), (6, 5), (4, 10), (8, 8)), "matrices": ((6, 5), (4, 10), (8, 8))}
"""Shapes of the parameters: a vector, and matrices that are tall, wide and square."""
SHAPES["square"] = ((8, 8),)
DECAY = 0.98
"""Factor from one gradient to the next, since gradients shrink while a model trains."""

Values = list[Tensor]


class Problem(NamedTuple):
    """First parameters, and the gradients of all steps."""

    params: Values
    grads: list[Values]


def problem(dtype: torch.dtype, shapes: str = "all") -> Problem:
    """Return the problem in one dtype, with random numbers drawn in float64 and then rounded.

    Args:
        dtype: the dtype of parameters and gradients.
        shapes: a key of SHAPES. A shape has the same numbers under each key.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn() -> Values:
        every = SHAPES["all"]
        values = [torch.randn(one, generator=generator, dtype=torch.float64) for one in every]
        return [one for one in values if one.shape in SHAPES[shapes]]

    params = drawn()
    grads = [[DECAY**step * one for one in drawn()] for step in range(max(STEPS))]
    return Problem([one.to(dtype) for one in params], [_cast(step, dtype) for step in grads])


def difference(ours: Sequence[Tensor], theirs: Sequence[Tensor], start: Sequence[Tensor]) -> float:
    """Return the largest difference, relative to the change by the other implementation.

    For each tensor, the largest absolute difference is divided by the largest absolute change since
    the start. A change of 0 on both sides counts as no difference.
    """
    worst = 0.0
    for one, other, before in zip(ours, theirs, start, strict=True):
        apart = float((one.double() - other.double()).abs().max())
        moved = float((other.double() - before.double()).abs().max())
        worst = max(worst, apart / moved if moved else (float("inf") if apart else 0.0))
    return worst


def _cast(values: Values, dtype: torch.dtype) -> Values:
    return [one.to(dtype) for one in values]
