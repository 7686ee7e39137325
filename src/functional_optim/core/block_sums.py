"""Sums over the elements of several tensors, block by block, in double precision.

A block fits the cache, and torch sums a block on one thread. So the sum does not depend on the
number of threads.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.dtensors import full_tensor

SUM_BLOCK = 1 << 15
"""Elements of a block."""


def sum_in_blocks(
    addends: Callable[..., tuple[Tensor, ...]], tensors: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Sum the results of a function over all blocks of tensors with equal numbers of elements.

    ``addends`` gets one 1-D block of each tensor, in float32 or wider, and returns 0-d float64
    tensors. A DTensor is gathered first.
    """
    flat = [full_tensor(one).reshape(-1) for one in tensors]
    blocks: Any = [flat]
    if flat[0].numel() > SUM_BLOCK:
        blocks = zip(*(one.split(SUM_BLOCK) for one in flat), strict=True)
    widen = lambda x: x.to(torch.promote_types(x.dtype, torch.float32))  # noqa: E731
    sums = [addends(*map(widen, block)) for block in blocks]
    return tuple(functools.reduce(operator.add, column) for column in zip(*sums, strict=True))


def finite_or_zero(sums: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the sums, or zeros if any sum is not finite."""
    is_finite = torch.isfinite(functools.reduce(operator.add, sums))
    return tuple(torch.where(is_finite, one, 0.0) for one in sums)
