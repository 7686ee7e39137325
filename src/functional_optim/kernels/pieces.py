"""Pieces: parts of large leaves, for steps whose temporaries have the size of a part.

Torch divides an operation on the CPU among its threads. The last elements of each thread's share
do not fill a vector, and torch computes some operations there in another way, such as ``sigmoid``
and the rounding of 16-bit floats. So a piece is a multiple of ``GRAIN_SIZE`` elements per thread,
or ends where a share of the whole ends.
"""

import os
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from functional_optim.core.stage import in_full_blocks
from functional_optim.kernels.chunks import flatten_dense, slice_chunk

GRAIN_SIZE = 1 << 15
"""Smallest number of elements of an operation that torch gives to one thread."""

PIECE = 1 << 20
"""Largest number of elements of a piece on the CPU."""

SMALL_PIECE = 1 << 17
"""Largest number on the CPU if a step has many temporaries, which should fit the cache."""

PIECE_ON_DEVICES = 1 << 25
"""Largest number on accelerators, where small pieces would take less time than their launches."""

PIECE_VARIABLE = "FUNCTIONAL_OPTIM_BLOCK"
"""Environment variable with the largest number of elements of a piece."""


def piece_elements(block_size: int = 1, device: str = "cpu", *, small: bool = False) -> int:
    """Return the largest number of elements of a piece, a multiple of ``block_size``."""
    asked = os.environ.get(PIECE_VARIABLE)
    if asked is not None:
        if not asked.isdigit() or int(asked) < 1:
            raise ValueError(
                f"{PIECE_VARIABLE} must be a whole number of elements >= 1, got {asked!r}"
            )
        size = int(asked)
    elif device != "cpu":
        size = PIECE_ON_DEVICES
    elif small:
        size = min(PIECE, max(SMALL_PIECE, torch.get_num_threads() * GRAIN_SIZE))
    else:
        size = PIECE
    return in_full_blocks(size, block_size)


def cut_chunk(tensors: Sequence[Tensor], block_size: int, most: int) -> list[list[Tensor]]:
    """Return the tensors of each piece of a chunk. A small chunk is one piece."""
    count = tensors[0].numel()
    if count <= most:
        return [list(tensors)]
    # Torch divides no blocks among its threads.
    lengths = piece_lengths(count, most, exact=block_size == 1 and tensors[0].is_cpu)
    return [
        slice_chunk(tensors, block_size, end - length, end)
        for length, end in zip(lengths, accumulate(lengths), strict=True)
    ]


def cut_lists(
    columns: Sequence[list[Tensor]], block_size: int, most: int
) -> list[Sequence[list[Tensor]]]:
    """Return lists of leaves with the size of a piece in total, and pieces of larger leaves.

    ``columns`` are a list of all parameters, one of all gradients, and one for each tensor of the
    state.
    """
    lengths = list(map(Tensor.numel, columns[0]))
    if sum(lengths) <= most:
        return [columns]
    found: list[Sequence[list[Tensor]]] = []
    for start, stop in split_slabs(lengths, most):
        if lengths[start] <= most:
            found.append([column[start:stop] for column in columns])
        else:
            chunk = [flatten_dense(column[start]) for column in columns]
            pieces = cut_chunk(chunk, block_size, most)
            found += [[[tensor] for tensor in piece] for piece in pieces]
    return found


def split_slabs(lengths: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Split lists into slabs ``[start, stop)`` of one leaf, or of at most ``most`` elements."""
    found, start, count = [], 0, 0
    for place, length in enumerate(lengths):
        if count and count + length > most:
            found.append((start, place))
            start, count = place, 0
        count += length
    return [*found, (start, len(lengths))]


def piece_lengths(total: int, block: int, *, exact: bool) -> list[int]:
    """Return the lengths of the pieces of a chunk, at most ``block`` elements each.

    If results depend on where pieces end (``exact``), a piece has at least ``GRAIN_SIZE`` elements
    per thread, even if ``block`` is smaller.
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
