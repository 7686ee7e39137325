"""The buffers that a transport takes: what is allowed, and how they are seen."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from sharding.transport.protocol import Range

SUMMED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
COMPLEX = (torch.complex64, torch.complex128, torch.complex32)


def check_buffer(flat: Tensor, ranges: Sequence[Range], size: int) -> None:
    """A flat buffer, and ranges of it that a group of ``size`` ranks can own.

    Raises:
        TypeError: ``flat`` is no tensor.
        ValueError: says which of the rules of :class:`~sharding.transport.Transport` is broken.
    """
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
    """The buffer as real numbers, and the ranges of it.

    Raises:
        TypeError: a dtype that is not summed.
    """
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
    """The buffer as bytes, and the ranges of it: a gather copies, whatever the dtype."""
    size = flat.element_size()
    real = torch.view_as_real(flat.detach()).view(-1) if flat.is_complex() else flat.detach()
    return real.view(torch.uint8), [(size * start, size * stop) for start, stop in ranges]


def divide(flat: Tensor, ranges: Sequence[Range]) -> None:
    """Divide what the ranges cover by their number, as torch's ``allreduce_hook`` does.

    Ranges beside one another are divided in one operation: usually one for the whole buffer.
    """
    for start, stop in _joined(ranges):
        flat.detach()[start:stop].div_(len(ranges))


def _joined(ranges: Sequence[Range]) -> list[Range]:
    """Return the longest ranges that cover the same elements; the ranges do not overlap."""
    found: list[Range] = []
    for start, stop in sorted(one for one in ranges if one[0] < one[1]):
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found


def divisor_of(flat: Tensor, ranges: Sequence[Range]) -> int:
    """By what the terms of an average are to be divided.

    Complex numbers are divided here: their quotients are not those of their real parts.

    Args:
        flat: of which a complex one is written to.
        ranges: one for each rank.
    """
    if not flat.is_complex():
        return len(ranges)
    divide(flat, ranges)
    return 1
