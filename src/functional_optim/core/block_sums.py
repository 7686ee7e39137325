"""Sums over the elements of several tensors, block by block, in double precision.

A block of one tensor fits a cache, and torch adds it up on one thread: the sum does not depend on
the number of threads.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.dtensors import whole

SUM_BLOCK = 1 << 15
"""Elements of a block."""


def sum_in_blocks(
    addends: Callable[..., tuple[Tensor, ...]], tensors: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Sum what a function gives for each block of some tensors with the same number of elements.

    Args:
        addends: takes a block of each tensor, of one dimension, in float32 at least, and returns
            0-d tensors in double precision.
        tensors: the tensors.

    Example::

        >>> import torch
        >>> def dot(x, y):
        ...     return ((x * y).sum(dtype=torch.float64),)
        >>> sum_in_blocks(dot, (torch.ones(70000), torch.ones(70000)))
        (tensor(70000., dtype=torch.float64),)
    """
    flat = [whole(one).reshape(-1) for one in tensors]
    blocks: Any = [flat]
    if flat[0].numel() > SUM_BLOCK:
        blocks = zip(*(one.split(SUM_BLOCK) for one in flat), strict=True)
    sums = [addends(*map(_widened, block)) for block in blocks]
    return tuple(functools.reduce(operator.add, column) for column in zip(*sums, strict=True))


def finite_or_zero(sums: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the sums of a tensor, or zeros if any of them is not finite."""
    is_finite = torch.isfinite(functools.reduce(operator.add, sums))
    return tuple(torch.where(is_finite, one, 0.0) for one in sums)


def _widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
