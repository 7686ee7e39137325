"""Cuts of 16-bit chunks, so that each piece rounds as the whole does.

Torch shares an operation on the CPU among its threads, and the last elements of each share, which
fill no vector, are rounded in another way. So a piece has to be whole grains for each thread, and
has to end where a share of the whole ends.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

GRAIN_SIZE = 1 << 15
"""Torch gives no thread fewer elements of an operation."""


def is_rounded_by_place(tensors: Sequence[Tensor], block_size: int) -> bool:
    """Return True if it shows where pieces of these tensors end.

    Args:
        tensors: of a chunk.
        block_size: in blocks of how many elements its chain works; blocks are nobody's shares.
    """
    short = min(tensor.dtype.itemsize for tensor in tensors) <= 2
    return short and block_size == 1 and tensors[0].is_cpu


def lengths(total: int, block: int, *, exact: bool) -> list[int]:
    """Return the lengths of a chunk's pieces.

    Args:
        total: its elements.
        block: how many a piece may have.
        exact: whether it shows where they end; then they may have more than ``block``, where that
            is less than a grain for each thread.

    Example::

        >>> lengths(10, 4, exact=False)
        [4, 4, 2]
    """
    if not exact or total <= block:
        return _cut(total, block)
    threads = torch.get_num_threads()
    sharing = min(threads, -(-total // GRAIN_SIZE))
    alignment = GRAIN_SIZE * threads
    size = max(block // alignment, 1) * alignment
    found: list[int] = []
    for share in _cut(total, -(-total // sharing)):
        pieces = _cut(share, size)
        last = pieces.pop()
        whole, rest = divmod(last, alignment)
        grains, rest = divmod(rest, GRAIN_SIZE)
        found += [*pieces, *(one for one in (whole * alignment, grains * GRAIN_SIZE, rest) if one)]
    return found


def _cut(total: int, size: int) -> list[int]:
    full, rest = divmod(total, size)
    return [size] * full + [rest] * (rest > 0)
