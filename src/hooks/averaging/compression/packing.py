"""Whole numbers of few bits, and words of floats, as bytes.

Numbers follow one another from the lowest bit of the first byte on. The loops are over the places
in one group of bytes, never over elements.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

_GROUP = {1: 8, 2: 4, 4: 2, 8: 1, 12: 2}
"""By number of bits: how many numbers fill whole bytes."""


def packed_bytes(count: int, bits: int) -> int:
    """The bytes that so many numbers take."""
    return -(-count * bits // 8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Numbers as bytes.

    Args:
        codes: shape (n,), whole numbers from 0 to 2^bits - 1: uint8, and int32 for 12 bits.
        bits: 1, 2, 4, 8 or 12.

    Returns:
        shape (packed_bytes(n, bits),), uint8; the bits left over are 0.
    """
    group = _GROUP[bits]
    rows = pad(codes, (0, -codes.numel() % group)).view(-1, group)
    words = torch.zeros(len(rows), dtype=_word(bits), device=codes.device)
    for place in range(group):
        words |= rows[:, place] << bits * place
    each = group * bits // 8
    made = [(words >> 8 * place & 0xFF).to(torch.uint8) for place in range(each)]
    return torch.stack(made, dim=1).view(-1)[: packed_bytes(codes.numel(), bits)]


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The numbers that bytes hold; the inverse of :func:`pack`.

    Args:
        packed: shape (packed_bytes(count, bits),), uint8.
        bits: 1, 2, 4, 8 or 12.
        count: of the numbers.

    Returns:
        shape (count,), uint8, and int32 for 12 bits.
    """
    group = _GROUP[bits]
    each = group * bits // 8
    rows = pad(packed, (0, -packed.numel() % each)).view(-1, each)
    words = torch.zeros(len(rows), dtype=_word(bits), device=packed.device)
    for place in range(each):
        words |= rows[:, place].to(words.dtype) << 8 * place
    made = [words >> bits * place & (1 << bits) - 1 for place in range(group)]
    return torch.stack(made, dim=1).view(-1)[:count]


def _word(bits: int) -> torch.dtype:
    """The dtype in which a group of numbers is one number."""
    return torch.int32 if bits > 8 else torch.uint8


def to_bytes(numbers: Tensor) -> Tensor:
    """The bytes of floats, as they lie in memory; a view."""
    return numbers.contiguous().view(-1).view(torch.uint8)


def from_bytes(payload: Tensor, dtype: torch.dtype) -> Tensor:
    """The floats of which these are the bytes; a view where it may be one."""
    even = payload.contiguous()
    if even.storage_offset() % dtype.itemsize:
        even = even.clone()  # a part of another buffer, which begins within a word
    return even.view(dtype)


def split(payload: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The parts of a payload, by their bytes; views."""
    return list(payload.split(list(sizes)))
