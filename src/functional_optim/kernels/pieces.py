"""Pieces: parts of large leaves, for steps and sums that need temporaries of their size."""

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from functional_optim.core.leaf import Leaf
from functional_optim.core.stage import Stage, block_size_of
from functional_optim.kernels.chunks import tensors_of, with_tensors
from functional_optim.kernels.shares import is_rounded_by_place, lengths

PIECE = 1 << 20
"""Largest number of elements of a piece on the CPU."""

PIECE_ON_DEVICES = 1 << 25
"""The same on accelerators, where the launches of small pieces take longer than their work."""

SAMPLE = 1 << 12
"""Largest number of elements of a sample. If a block is larger, a sample is one block."""


def fit_a_piece(leaves: Sequence[Leaf]) -> bool:
    """Return True if all leaves together are not larger than a piece."""
    return not leaves or sum(leaf.param.numel() for leaf in leaves) <= _most(leaves[0])


def _most(leaf: Leaf) -> int:
    return PIECE if leaf.param.is_cpu else PIECE_ON_DEVICES


def sample_of(stages: Sequence[Stage], leaf: Leaf) -> Leaf:
    """Return the first elements of a leaf, which pointwise stages treat as all others."""
    block_size = block_size_of(stages)
    length = max(1, SAMPLE // block_size) * block_size
    if leaf.param.numel() <= length or leaf.param.dim() == 0:
        return leaf
    return _cut(leaf, 0, length, block_size)


def pieces_of(stages: Sequence[Stage], leaf: Leaf) -> list[Leaf]:
    """Return a large leaf in pieces, so that temporaries of one are small beside the whole."""
    count, most = leaf.param.numel(), _most(leaf)
    if count <= most or leaf.param.dim() == 0:
        return [leaf]
    block_size = block_size_of(stages)
    size = max(1, most // block_size) * block_size
    pieces = lengths(count, size, exact=is_rounded_by_place(tensors_of(leaf), block_size))
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
