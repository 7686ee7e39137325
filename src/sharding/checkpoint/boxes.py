"""Boxes: blocks of a tensor that ``torch.distributed.checkpoint`` saves and loads."""

import math
from collections.abc import Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """Block of a tensor whose elements are consecutive in row-major order."""

    offsets: tuple[int, ...]
    """Index of the first element, in each dimension."""
    sizes: tuple[int, ...]
    """Number of elements in each dimension."""
    start: int
    """Index of the first element in row-major order."""

    @property
    def stop(self) -> int:
        """Return the index after the last element in row-major order."""
        return self.start + math.prod(self.sizes)


def boxes_of(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Return elements [start, stop) of a row-major tensor as boxes, in their order.

    A tensor of n dimensions needs at most 2 (n - 1) + 1 boxes: the end of the first row, whole
    rows, and the beginning of the last row, where partial rows are split in the same way.

    Returns:
        The boxes. A tensor without elements has one empty box.

    Example::

        >>> for box in boxes_of((3, 4), 2, 9):
        ...     print(box.offsets, box.sizes)
        (0, 2) (1, 2)
        (1, 0) (1, 4)
        (2, 0) (1, 1)
    """
    if math.prod(shape) == 0:
        return [Box((0,) * len(shape), tuple(shape), 0)]
    return _split(tuple(shape), start, stop) if start < stop else []


def _split(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    if len(shape) < 2:
        return [Box((start,) * len(shape), (stop - start,) * len(shape), start)]
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows: [first, last)
    if first > last:
        return _in_row(shape, last, start, stop)
    found = _in_row(shape, first - 1, start, first * row) if start < first * row else []
    if first < last:
        offsets = (first, *(0,) * (len(shape) - 1))
        found.append(Box(offsets, (last - first, *shape[1:]), first * row))
    return found + (_in_row(shape, last, last * row, stop) if last * row < stop else [])


def _in_row(shape: tuple[int, ...], number: int, start: int, stop: int) -> list[Box]:
    """Return the boxes of elements of one row."""
    before = number * math.prod(shape[1:])
    return [
        Box((number, *box.offsets), (1, *box.sizes), before + box.start)
        for box in _split(shape[1:], start - before, stop - before)
    ]
