"""Compression to 2 bits per element (or 1, or 4), with levels from each block's statistics.

For a block x_1 ... x_n with mean m and standard deviation s = sqrt(sum (x_i - m)^2 / n), the bins
have the edges m + s e_j, with e_1 < ... < e_(2^bits - 1). All elements of a bin B are decoded as
their mean:

    x'_i = sum over k in B of x_k / |B|,        i in B

The means have the smallest square error for these bins, and preserve the sum of the block. The
default edges are those of Lloyd and Max, with the smallest square error for normal numbers: 0.1175
s^2 with 2 bits.

The statistical quantiser of MuLoCo (in its authors' code, per tensor or per row) also sends the
means of bins. Its bins have the width 6 s / 2^bits, and code c has the numbers that, divided by
this width, round to c - 2^(bits - 1). With 2 bits the edges are -2.25, -0.75 and 0.75: not
symmetric, and with a square error of 0.178 s^2 for normal numbers, half as much again. ``edges``
accepts them.

Sums have the same order everywhere, and comparisons are exact, so the same block gives the same
bytes on every machine.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from hooks.averaging.compression.checks import (
    check_choice,
    check_int,
    check_payload,
    finite_float32,
)
from hooks.averaging.compression.packing import (
    block_count,
    from_bytes,
    pack,
    packed_bytes,
    to_bytes,
    to_rows,
    unpack,
)

_FILL = 255
"""The code of padding in the last block: no level has it."""

_UPPER_EDGES = {
    1: (),
    2: (0.9816,),
    4: (0.2582, 0.5224, 0.7996, 1.0993, 1.4371, 1.8435, 2.4008),
}
"""By bits: the positive edges that are best for a normal distribution (Max 1960, table I)."""


def lloyd_max_edges(bits: int) -> tuple[float, ...]:
    """Return the edges that are best for a standard normal distribution, with 1, 2 or 4 bits."""
    upper = _UPPER_EDGES[bits]
    return (*(-edge for edge in reversed(upper)), 0.0, *upper)


@dataclass(frozen=True)
class Statistical:
    """``2^bits`` levels per block: the means of bins about the block's mean.

    An element is in the bin with ``lower edge < x <= upper edge``; the outermost bins end at the
    smallest and the largest element of the block. With ``l`` and ``u`` the ends of the bin of x::

        |x' - x| <= max(x - l, u - x)

    The sum of a block is preserved, up to rounding.

    Args:
        bits: 2, 1 or 4, per element.
        block: number of consecutive elements that share levels. Each block has 2^bits levels in
            float32: 16 bytes with 2 bits.
        edges: 2^bits - 1 ascending numbers, in standard deviations from the mean; None for those of
            Lloyd and Max. Those of MuLoCo with 2 bits are (-2.25, -0.75, 0.75).

    Raises:
        ValueError: bits or block has another value; edges have another number, or are not finite
            and ascending.

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
        check_choice("bits", self.bits, (2, 1, 4), "with 8 take Blocks")
        check_int("block", self.block, least=1)
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
        rows = to_rows(wide, self.block)
        codes = torch.zeros_like(rows, dtype=torch.uint8)
        for cut in self._cuts(rows, numel):
            codes += rows > cut
        codes.view(-1)[numel:] = _FILL
        levels = torch.cat(
            [_masked_mean(rows, codes == code) for code in range(self._levels)], dim=1
        )
        packed = pack(codes.view(-1)[:numel], self.bits)
        return torch.cat((to_bytes(levels), packed))

    def decode(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """See :meth:`Compression.decode`."""
        check_payload(payload, self.payload_bytes(numel), numel, dtype)
        head, packed = payload.split(self._sizes(numel))
        levels = from_bytes(head, torch.float32).view(-1, self._levels)
        codes = to_rows(unpack(packed, self.bits, numel), self.block)
        return levels.gather(1, codes.to(torch.int64)).view(-1)[:numel].to(dtype, copy=True)

    def payload_bytes(self, numel: int) -> int:
        """See :meth:`Compression.payload_bytes`."""
        return sum(self._sizes(check_int("numel", numel, least=0)))

    def error_bound(self, flat: Tensor) -> Tensor:
        """Return the bound of the class; see :meth:`Compression.error_bound`."""
        wide = finite_float32(flat)
        rows = to_rows(wide, self.block).clone()
        cuts = self._cuts(rows, wide.numel())
        rows.view(-1)[wide.numel() :] = wide[-1:]  # padding is neither minimum nor maximum
        lower = rows.amin(dim=1, keepdim=True).to(torch.float64).expand_as(rows)
        upper = rows.amax(dim=1, keepdim=True).to(torch.float64).expand_as(rows)
        for cut in cuts:
            above = rows > cut
            lower = torch.where(above, lower.maximum(cut), lower)
            upper = torch.where(above, upper, upper.minimum(cut))
        bound = torch.maximum(rows - lower, upper - rows)
        return bound.view(-1)[: wide.numel()]

    def _sizes(self, numel: int) -> list[int]:
        """Return the bytes of the levels, and of the codes."""
        levels = block_count(numel, self.block) * self._levels * torch.float32.itemsize
        return [levels, packed_bytes(numel, self.bits)]

    def _cuts(self, rows: Tensor, numel: int) -> list[Tensor]:
        """Return the edges of each row's bins: float32 of shape (rows, 1) for each edge."""
        count = torch.full(
            (len(rows), 1), float(self.block), dtype=torch.float64, device=rows.device
        )
        count[-1:] -= -numel % self.block  # without padding
        mean = sum_rows(rows) / count
        squares = (rows.to(torch.float64) - mean).square_()
        squares.view(-1)[numel:] = 0
        deviation = (sum_rows(squares) / count).sqrt_()
        return [(mean + deviation * edge).to(torch.float32) for edge in self._edges]


def _masked_mean(rows: Tensor, chosen: Tensor) -> Tensor:
    """Return the mean of the chosen elements of each row, 0 without any: float32, (rows, 1)."""
    total = sum_rows(torch.where(chosen, rows, 0.0))
    return (total / chosen.sum(dim=1, keepdim=True).clamp_(min=1)).to(torch.float32)


def sum_rows(rows: Tensor) -> Tensor:
    """Return the sum of each row, in float64: shape (rows, 1).

    Adds the second half of the columns to the first, until one column is left. ``torch.sum`` adds
    in an order that depends on vector units and threads, so its last bit differs between machines.
    Rounding is monotone: n float32 numbers between a and b have a sum between n a and n b, if n is
    at most 2^29.

    Args:
        rows: shape (rows, width), floating, width >= 1; not changed.
    """
    width = rows.shape[1]
    total = rows
    while width > 1:
        half = (width + 1) // 2
        first = total[:, :half].to(torch.float64, copy=True)
        first[:, : width - half] += total[:, half:width]
        total, width = first, half
    return total.to(torch.float64)
