"""A vector in rows of one block each, and sums of rows that are the same on every machine."""

import torch
from torch import Tensor
from torch.nn.functional import pad


def in_rows(flat: Tensor, width: int) -> Tensor:
    """The elements in rows of a block, the last filled up with zeros: shape (blocks, width)."""
    return pad(flat, (0, -flat.numel() % width)).view(-1, width)


def blocks_of(numel: int, width: int) -> int:
    """Return how many blocks a vector has."""
    return -(-numel // width)


def members(numel: int, width: int, device: torch.device) -> Tensor:
    """The elements of each block, fill not counted: shape (blocks, 1), float64."""
    counts = torch.full(
        (blocks_of(numel, width), 1), float(width), dtype=torch.float64, device=device
    )
    counts[-1:] -= -numel % width
    return counts


def sum_of_rows(rows: Tensor) -> Tensor:
    """The sum of each row, in float64: shape (rows, 1).

    The second half is added to the first until one column is left. ``torch.sum`` adds in an order
    that is another one with other vector units and other numbers of threads, so that its last bit
    is not the same on all machines. Rounding is monotone: n numbers of float32 between a and b sum
    up to no less than n a and no more than n b, as long as n is no more than 2^29.

    Args:
        rows: shape (rows, width), floating, width >= 1; it is left as it is.
    """
    width = rows.shape[1]
    total = rows
    while width > 1:
        half = (width + 1) // 2
        first = total[:, :half].to(torch.float64, copy=True)
        first[:, : width - half] += total[:, half:width]
        total, width = first, half
    return total.to(torch.float64)
