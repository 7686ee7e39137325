"""Pieces: parts of large leaves, for steps whose temporaries have the size of a part.

Torch divides an operation on the CPU among its threads. The last elements of each thread's share
do not fill a vector, and torch rounds 16-bit floats there in another way. So a piece of such a
tensor is a multiple of ``GRAIN_SIZE`` elements per thread, or ends where a share of the whole ends.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from functional_optim.core.leaf import Leaf
from functional_optim.core.stage import Stage, block_size_of
from functional_optim.kernels.chunks import tensors_of, with_tensors

GRAIN_SIZE = 1 << 15
"""Smallest number of elements of an operation that torch gives to one thread."""

PIECE = 1 << 20
"""Largest number of elements of a piece on the CPU."""

PIECE_ON_DEVICES = 1 << 25
"""Largest number on accelerators, where small pieces would take less time than their launches."""


def _max_elements(leaf: Leaf) -> int:
    return PIECE if leaf.param.is_cpu else PIECE_ON_DEVICES


def pieces_of(stages: Sequence[Stage], leaf: Leaf) -> list[Leaf]:
    """Return the pieces of a large leaf. A small leaf is one piece."""
    count, most = leaf.param.numel(), _max_elements(leaf)
    if count <= most or leaf.param.dim() == 0:
        return [leaf]
    block_size = block_size_of(stages)
    size = max(1, most // block_size) * block_size
    pieces = piece_lengths(count, size, exact=is_rounded_by_place(tensors_of(leaf), block_size))
    return [
        _cut(leaf, end - length, length, block_size)
        for length, end in zip(pieces, accumulate(pieces), strict=True)
    ]


def _cut(leaf: Leaf, start: int, length: int, block_size: int) -> Leaf:
    """Return some elements of a leaf, with their state."""
    count = leaf.param.numel()

    def cut(tensor: Tensor) -> Tensor:
        flat = tensor.detach().reshape(-1)
        if tensor.numel() == count:
            return flat[start : start + length]
        if tensor.numel() == -(-count // block_size):
            return flat[start // block_size : -(-(start + length) // block_size)]
        return tensor

    return with_tensors(leaf, list(map(cut, tensors_of(leaf))))


def is_rounded_by_place(tensors: Sequence[Tensor], block_size: int) -> bool:
    """Return True if the results depend on where the pieces of these tensors end.

    Args:
        tensors: of a chunk.
        block_size: the granularity of the chain. Torch divides no blocks among its threads.
    """
    short = min(tensor.dtype.itemsize for tensor in tensors) <= 2
    return short and block_size == 1 and tensors[0].is_cpu


def piece_lengths(total: int, block: int, *, exact: bool) -> list[int]:
    """Return the lengths of the pieces of a chunk.

    Args:
        total: number of elements of the chunk.
        block: largest number of elements of a piece.
        exact: True if the results depend on where pieces end. Then a piece has at least
            ``GRAIN_SIZE`` elements per thread, even if ``block`` is smaller.

    Example::

        >>> piece_lengths(10, 4, exact=False)
        [4, 4, 2]
    """
    if not exact or total <= block:
        return _split_length(total, block)
    threads = torch.get_num_threads()
    sharing = min(threads, -(-total // GRAIN_SIZE))
    alignment = GRAIN_SIZE * threads
    size = max(block // alignment, 1) * alignment
    found: list[int] = []
    for share in _split_length(total, -(-total // sharing)):
        pieces = _split_length(share, size)
        last = pieces.pop()
        whole, rest = divmod(last, alignment)
        grains, rest = divmod(rest, GRAIN_SIZE)
        found += [*pieces, *(one for one in (whole * alignment, grains * GRAIN_SIZE, rest) if one)]
    return found


def _split_length(total: int, size: int) -> list[int]:
    full, rest = divmod(total, size)
    return [size] * full + [rest] * (rest > 0)
