"""2 bits an element (or 1, or 4), with levels that each block's own statistics set.

For a block x_1 ... x_n with mean m and standard deviation s = sqrt(sum (x_i - m)^2 / n), the line
is cut at m + s e_j, for edges e_1 < ... < e_(2^bits - 1). All elements of a bin B arrive as their
mean:

    x'_i = sum over k in B of x_k / |B|,        i in B

The means are the levels with the least square error that these bins allow, and keep the sum of the
block. The edges are by default those of Lloyd and Max, with which the square error of numbers from
a normal distribution is least: 0.1175 s^2 with 2 bits.

The statistical quantiser of MuLoCo (as its authors' code has it, for each tensor or each row of
one) also sends the means of bins about the mean. Its bins have the width 6 s / 2^bits, and code c
is the one of numbers that divided by it round to c - 2^(bits - 1): with 2 bits the edges -2.25,
-0.75 and 0.75, which are not symmetric, and leave half as much again of a normal distribution's
square error: 0.178 s^2. ``edges`` takes them.

Sums are made in an order that is the same everywhere, and comparisons are exact, so the same block
makes the same bytes on every machine.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from hooks.averaging.compression.checks import among, check_payload, finite_float32, whole
from hooks.averaging.compression.packing import (
    from_bytes,
    pack,
    packed_bytes,
    split,
    to_bytes,
    unpack,
)
from hooks.averaging.compression.rows import blocks_of, in_rows

_FILL = 255
"""The code of what fills up the last block: no level's."""

_UPPER_EDGES = {
    1: (),
    2: (0.9816,),
    4: (0.2582, 0.5224, 0.7996, 1.0993, 1.4371, 1.8435, 2.4008),
}
"""By bits: the edges above 0 that are best for a normal distribution (Max 1960, table I)."""


def lloyd_max_edges(bits: int) -> tuple[float, ...]:
    """The edges that are best for a normal distribution with mean 0 and deviation 1.

    Args:
        bits: 1, 2 or 4.
    """
    upper = _UPPER_EDGES[bits]
    return (*(-edge for edge in reversed(upper)), 0.0, *upper)


@dataclass(frozen=True)
class Statistical:
    """For each block, as many levels as its bits can number: the means of bins about its mean.

    An element ends in the bin whose lower edge it is above and whose upper edge it is not; the
    outermost bins end at the least and the largest element of the block. With ``l`` and ``u`` the
    ends of the bin of x::

        |x' - x| <= max(x - l, u - x)

    The sum of a block's elements arrives as it was, but for rounding.

    Args:
        bits: 2, 1 or 4, of each element.
        block: elements that share levels, in the order of the vector. Each block has 2^bits levels
            in float32: 16 bytes with 2 bits.
        edges: 2^bits - 1 ascending numbers, in standard deviations from the mean; None is the ones
            of Lloyd and Max. Those of MuLoCo with 2 bits are (-2.25, -0.75, 0.75).

    Raises:
        ValueError: bits or block is none of these, or edges are not as many, finite and ascending.

    Example::

        >>> import torch
        >>> from hooks.averaging.contrib import Statistical
        >>> two, flat = Statistical(bits=2), torch.tensor([-5.0, -1.0, -1.5, 1.0, 1.5, 5.0])
        >>> two.payload_bytes(6)
        18
        >>> two.decode(two.encode(flat), 6, torch.float32)
        tensor([-5.0000, -1.2500, -1.2500,  1.2500,  1.2500,  5.0000])

    Reference:
        Therien, Huang, Defazio, Rish and Belilovsky, "MuLoCo: Muon is a Practical Inner Optimizer
        for DiLoCo", 2025 (arXiv 2505.23725), its statistical quantisation; the edges by Max,
        "Quantizing for Minimum Distortion", 1960, table I.
    """

    bits: Literal[2, 1, 4] = 2
    block: int = 1024
    edges: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        among("bits", self.bits, (2, 1, 4), "with 8 take Blocks")
        whole("block", self.block, least=1)
        edges: Any = self._edges
        if (
            not isinstance(edges, tuple)
            or len(edges) != self._levels - 1
            or not all(map(math.isfinite, edges))
            or any(one >= other for one, other in itertools.pairwise(edges))
        ):
            raise ValueError(
                f"edges must be a tuple of {self._levels - 1} finite ascending numbers for "
                f"{self.bits} bits, got {self.edges!r}"
            )

    @property
    def _levels(self) -> int:
        return 1 << self.bits

    @property
    def _edges(self) -> tuple[float, ...]:
        return lloyd_max_edges(self.bits) if self.edges is None else self.edges

    def encode(self, flat: Tensor) -> Tensor:
        """See :meth:`Compression.encode`."""
        wide = finite_float32(flat)
        numel = wide.numel()
        rows = in_rows(wide, self.block)
        codes = torch.zeros_like(rows, dtype=torch.uint8)
        for cut in self._cuts(rows, numel):
            codes += rows > cut
        codes.view(-1)[numel:] = _FILL
        levels = torch.cat([_mean_of(rows, codes == code) for code in range(self._levels)], dim=1)
        packed = pack(codes.view(-1)[:numel], self.bits)
        return torch.cat((to_bytes(levels), packed))

    def decode(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """See :meth:`Compression.decode`."""
        check_payload(payload, self.payload_bytes(numel), numel, dtype)
        head, packed = split(payload, self._sizes(numel))
        levels = from_bytes(head, torch.float32).view(-1, self._levels)
        codes = in_rows(unpack(packed, self.bits, numel), self.block)
        return levels.gather(1, codes.to(torch.int64)).view(-1)[:numel].to(dtype, copy=True)

    def payload_bytes(self, numel: int) -> int:
        """See :meth:`Compression.payload_bytes`."""
        return sum(self._sizes(whole("numel", numel, least=0)))

    def error_bound(self, flat: Tensor) -> Tensor:
        """The bound of the class; see :meth:`Compression.error_bound`."""
        wide = finite_float32(flat)
        rows = in_rows(wide, self.block).clone()
        cuts = self._cuts(rows, wide.numel())
        rows.view(-1)[wide.numel() :] = wide[-1:]  # so that no fill is the least or the largest
        lower = rows.amin(dim=1, keepdim=True).to(torch.float64).expand_as(rows)
        upper = rows.amax(dim=1, keepdim=True).to(torch.float64).expand_as(rows)
        for cut in cuts:
            above = rows > cut
            lower = torch.where(above, lower.maximum(cut), lower)
            upper = torch.where(above, upper, upper.minimum(cut))
        bound = torch.maximum(rows - lower, upper - rows)
        return bound.view(-1)[: wide.numel()]

    def _sizes(self, numel: int) -> tuple[int, int]:
        """The bytes of the levels, and of the codes."""
        levels = blocks_of(numel, self.block) * self._levels * torch.float32.itemsize
        return levels, packed_bytes(numel, self.bits)

    def _cuts(self, rows: Tensor, numel: int) -> list[Tensor]:
        """Return the ends of each row's bins: for each edge, float32 of shape (rows, 1)."""
        count = members(numel, self.block, rows.device)
        mean = sum_of_rows(rows) / count
        squares = (rows.to(torch.float64) - mean).square_()
        squares.view(-1)[numel:] = 0
        deviation = (sum_of_rows(squares) / count).sqrt_()
        return [(mean + deviation * edge).to(torch.float32) for edge in self._edges]


def _mean_of(rows: Tensor, chosen: Tensor) -> Tensor:
    """The mean of the chosen elements of each row, 0 of none: float32 of shape (rows, 1)."""
    total = sum_of_rows(torch.where(chosen, rows, 0.0))
    return (total / chosen.sum(dim=1, keepdim=True).clamp_(min=1)).to(torch.float32)


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
