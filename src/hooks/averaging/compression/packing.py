"""Packing of small integers and of float words into bytes, and rows of blocks.

Integers follow one another from the lowest bit of the first byte on. Loops run over the positions
in one group of bytes, never over elements.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

_GROUP = {1: 8, 2: 4, 4: 2, 8: 1, 12: 2}
"""By number of bits: how many integers fill whole bytes."""


def packed_bytes(count: int, bits: int) -> int:
    return -(-count * bits // 8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack integers into bytes; unused bits are 0.

    Args:
        codes: shape (n,), integers from 0 to 2^bits - 1: uint8, and int32 for 12 bits.
        bits: 1, 2, 4, 8 or 12.
    """
    group = _GROUP[bits]
    rows = pad(codes, (0, -codes.numel() % group)).view(-1, group)
    words = torch.zeros(len(rows), dtype=_word(bits), device=codes.device)
    for position in range(group):
        words |= rows[:, position] << bits * position
    each = group * bits // 8
    columns = [(words >> 8 * position & 0xFF).to(torch.uint8) for position in range(each)]
    return torch.stack(columns, dim=1).view(-1)[: packed_bytes(codes.numel(), bits)]


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Return ``count`` integers of packed bytes: uint8, and int32 for 12 bits."""
    group = _GROUP[bits]
    each = group * bits // 8
    rows = pad(packed, (0, -packed.numel() % each)).view(-1, each)
    words = torch.zeros(len(rows), dtype=_word(bits), device=packed.device)
    for position in range(each):
        words |= rows[:, position].to(words.dtype) << 8 * position
    columns = [words >> bits * position & (1 << bits) - 1 for position in range(group)]
    return torch.stack(columns, dim=1).view(-1)[:count]


def _word(bits: int) -> torch.dtype:
    """Return the dtype in which a group of integers is one word."""
    return torch.int32 if bits > 8 else torch.uint8


def to_bytes(numbers: Tensor) -> Tensor:
    """Return the bytes of floats as a view, or of a contiguous copy."""
    return numbers.contiguous().view(-1).view(torch.uint8)


def from_bytes(payload: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the floats with these bytes, as a view if possible."""
    even = payload.contiguous()
    if even.storage_offset() % dtype.itemsize:
        even = even.clone()  # a slice of a buffer that is not aligned
    return even.view(dtype)


def to_rows(flat: Tensor, width: int) -> Tensor:
    """Return a vector as rows of one block, the last padded with zeros: shape (blocks, width)."""
    return pad(flat, (0, -flat.numel() % width)).view(-1, width)


def block_count(numel: int, width: int) -> int:
    return -(-numel // width)
