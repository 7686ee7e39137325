"""Compression to 8 or 4 bits per element, with one scale per block.

For a block x_1 ... x_n, with L = 2^(bits - 1) - 1:

    s   = max |x_i| / L, rounded up to a number of scale_dtype
    q_i = round(x_i / s), an integer from -L to L
    x'_i = q_i s

The steps are equal. The 8-bit code for optimizer state has finer steps near zero, because rules
divide by state, and coarser steps for large values: its error is up to |x| / 16, here max |x| /
254. On normal numbers the square error of that code is 14 times as large. A mean over ranks needs a
small absolute error, not a small relative error of small values.

The scale is rounded up, so that no value is clipped, also for subnormal numbers. It may be stored
in bfloat16, which has the range of float32. float16 has not: the changes of a small learning rate
would have subnormal scales.
"""

from dataclasses import dataclass
from typing import Literal

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

_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Blocks:
    """Integer multiples of one scale per block, symmetric about zero.

    With ``s`` the scale of a block, which is its largest magnitude divided by 127 (8 bits) or by 7
    (4 bits), and rounded up::

        |x' - x| <= (1/2 + 2^-15) s + 2^-149

    Zero is decoded as zero, and no number changes its sign.

    Args:
        bits: 8 or 4, per element.
        block: number of consecutive elements that share a scale.
        scale_dtype: torch.float32, or torch.bfloat16, which makes the steps larger by up to 2^-7.

    Raises:
        ValueError: bits, block or scale_dtype has another value.

    Example::

        >>> import torch
        >>> from hooks.averaging.compression import Blocks
        >>> four, flat = Blocks(bits=4), torch.tensor([0.7, -0.31, 0.0])
        >>> four.payload_bytes(3)
        6
        >>> four.decode(four.encode(flat), 3, torch.float32)
        tensor([ 0.7000, -0.3000,  0.0000])
    """

    bits: Literal[8, 4] = 8
    block: int = 256
    scale_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        check_choice(
            "bits", self.bits, (8, 4), "with 2 or 1 take hooks.averaging.contrib.Statistical"
        )
        check_int("block", self.block, least=1)
        if self.scale_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(
                f"scale_dtype must be torch.float32 or torch.bfloat16, got {self.scale_dtype!r}"
            )

    @property
    def _last(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def encode(self, flat: Tensor) -> Tensor:
        """See :meth:`Compression.encode`."""
        wide = finite_float32(flat)
        rows = to_rows(wide, self.block)
        scale = self._scale(rows)
        steps = (rows / (scale + (scale == 0))).round_().clamp_(-self._last, self._last)
        codes = (steps + (self._last + 1)).to(torch.uint8).view(-1)[: wide.numel()]
        scales = to_bytes(scale.to(self.scale_dtype))
        return torch.cat((scales, pack(codes, self.bits)))

    def decode(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """See :meth:`Compression.decode`."""
        check_payload(payload, self.payload_bytes(numel), numel, dtype)
        scales, packed = payload.split(self._sizes(numel))
        scale = from_bytes(scales, self.scale_dtype).to(torch.float32).view(-1, 1)
        codes = to_rows(unpack(packed, self.bits, numel), self.block)
        steps = codes.to(torch.float32).sub_(self._last + 1)
        # The scale is rounded up, so decoded values near the largest float32 could overflow.
        rows = steps.mul_(scale).clamp_(-_LARGEST, _LARGEST)
        return rows.view(-1)[:numel].to(dtype, copy=True)

    def payload_bytes(self, numel: int) -> int:
        """See :meth:`Compression.payload_bytes`."""
        return sum(self._sizes(check_int("numel", numel, least=0)))

    def error_bound(self, flat: Tensor) -> Tensor:
        """Return the bound of the class; see :meth:`Compression.error_bound`."""
        wide = finite_float32(flat)
        scale = self._scale(to_rows(wide, self.block)).to(torch.float64)
        bound = scale * (0.5 + 2.0**-15) + 2.0**-149
        return bound.expand(-1, self.block).reshape(-1)[: wide.numel()]

    def _sizes(self, numel: int) -> list[int]:
        """Return the bytes of the scales, and of the codes."""
        scales = block_count(numel, self.block) * self.scale_dtype.itemsize
        return [scales, packed_bytes(numel, self.bits)]

    def _scale(self, rows: Tensor) -> Tensor:
        """Return the decoded scale of each row, in float32: shape (rows, 1)."""
        wanted = rows.abs().amax(dim=1, keepdim=True).to(torch.float64) / self._last
        near = wanted.to(torch.float32)
        # Adding 1 to the bits of a positive float gives the next larger float.
        words = near.view(torch.int32) + (near.to(torch.float64) < wanted)
        if self.scale_dtype == torch.bfloat16:
            words = (words + 0xFFFF) & -0x10000
        return words.view(torch.float32)
