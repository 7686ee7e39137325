"""Buffers of a transport: checks, views as real numbers or bytes, division, and scratch memory."""

import threading
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from sharding.transport.protocol import Range

SUMMED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
COMPLEX = (torch.complex64, torch.complex128, torch.complex32)


def check_buffer(flat: Tensor, ranges: Sequence[Range], size: int) -> None:
    """Check a flat buffer, and its ranges for a group of ``size`` ranks."""
    if not isinstance(flat, Tensor):
        raise TypeError(f"flat must be a tensor, got {type(flat).__name__}")
    if flat.layout != torch.strided or flat.dim() != 1 or not flat.is_contiguous():
        raise ValueError(
            "flat must be a dense, contiguous tensor of one dimension, got shape "
            f"{tuple(flat.shape)}, strides {flat.stride() if flat.layout == torch.strided else ()} "
            f"and layout {flat.layout}; copy into a flat buffer first"
        )
    if flat.is_conj() or flat.is_neg():
        raise ValueError(
            "flat is a lazy conjugate (or negative) of other memory, which cannot be written in "
            "place; resolve_conj() it"
        )
    if len(ranges) != size:
        raise ValueError(
            f"ranges must have one range for each of the {size} ranks of the group, got "
            f"{len(ranges)}; give (0, 0) to a rank that owns nothing"
        )
    for rank, (start, stop) in enumerate(ranges):
        if not 0 <= start <= stop <= flat.numel():
            raise ValueError(
                f"the range of group rank {rank} is [{start}, {stop}), which is not within the "
                f"buffer's [0, {flat.numel()}), start first"
            )
    owned = sorted((start, stop, rank) for rank, (start, stop) in enumerate(ranges) if start < stop)
    for (_, stop, one), (start, _, other) in pairwise(owned):
        if start < stop:
            raise ValueError(
                f"the ranges of group ranks {min(one, other)} and {max(one, other)} overlap at "
                f"element {start}; every element has one owner"
            )


def as_real(flat: Tensor, ranges: Sequence[Range]) -> tuple[Tensor, list[Range]]:
    """Return a view of the buffer as real numbers, and the ranges of that view."""
    if flat.dtype in COMPLEX:
        real = torch.view_as_real(flat.detach()).view(-1)
        return real, [(2 * start, 2 * stop) for start, stop in ranges]
    if flat.dtype not in SUMMED:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in SUMMED)
        raise TypeError(
            f"reduce_scatter sums {names} and complex buffers, got {flat.dtype}; convert it first"
        )
    return flat.detach(), list(ranges)


def as_bytes(flat: Tensor, ranges: Sequence[Range]) -> tuple[Tensor, list[Range]]:
    """Return a view of the buffer as bytes, for gathers, and the ranges of the view."""
    size = flat.element_size()
    real = torch.view_as_real(flat.detach()).view(-1) if flat.is_complex() else flat.detach()
    return real.view(torch.uint8), [(size * start, size * stop) for start, stop in ranges]


def divide(flat: Tensor, ranges: Sequence[Range]) -> None:
    """Divide the elements of all ranges by the number of ranges, as torch's ``allreduce_hook``.

    Adjacent ranges are divided in one operation, usually one for the whole buffer.
    """
    for start, stop in _merge_adjacent(ranges):
        flat.detach()[start:stop].div_(len(ranges))


def _merge_adjacent(ranges: Sequence[Range]) -> list[Range]:
    found: list[Range] = []
    for start, stop in sorted(one for one in ranges if one[0] < one[1]):
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found


def prepare_average(flat: Tensor, ranges: Sequence[Range]) -> int:
    """Return the divisor for each term of an average.

    A complex buffer is divided here, and the divisor is then 1: a complex quotient differs in bits
    from the quotients of its real and imaginary parts.
    """
    if not flat.is_complex():
        return len(ranges)
    divide(flat, ranges)
    return 1


class ScratchPool:
    """Pool of reusable buffers, for data that is received before it is added.

    The number of buffers is the largest number in use at once. No buffer is larger than the largest
    request.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._lock = threading.Lock()
        self.allocated_bytes = 0
        """The bytes of all buffers, in use and free."""

    def acquire(self, nbytes: int) -> Tensor:
        """Return the smallest free buffer of at least ``nbytes`` bytes, or allocate one."""
        with self._lock:
            fitting = [at for at, one in enumerate(self._free) if one.numel() >= nbytes]
            if fitting:
                return self._free.pop(min(fitting, key=lambda at: self._free[at].numel()))
            if self._free:  # the new buffer replaces the largest free one
                largest = max(range(len(self._free)), key=lambda at: self._free[at].numel())
                self.allocated_bytes -= self._free.pop(largest).numel()
            self.allocated_bytes += nbytes
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def release(self, buffer: Tensor) -> None:
        """Return a buffer to the pool."""
        with self._lock:
            self._free.append(buffer)
