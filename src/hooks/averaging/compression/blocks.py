"""8 or 4 bits an element, with one scale for each block.

For a block x_1 ... x_n, with L = 2^(bits - 1) - 1:

    s   = max |x_i| / L, rounded up to a number of scale_dtype
    q_i = round(x_i / s), a whole number from -L to L
    x'_i = q_i s

The steps are even. The 8-bit code in which an optimizer's state is stored has finer steps near
zero, since a rule divides by what it keeps, and pays for it above: it is wrong by up to |x| / 16,
this one by max |x| / 254, and on normal numbers its square error is 14 times as large. A mean over
ranks asks for a small error, not for a small relative error of what is small.

The scale is rounded up, so that nothing is cut off, in subnormal numbers either. It may be kept in
bfloat16, which has the range of float32; in float16 the scales of changes that a small learning
rate makes would be subnormal.
"""

from dataclasses import dataclass
from typing import Literal

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

_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Blocks:
    """Whole multiples of one scale for each block, symmetric about zero.

    With ``s`` the scale of a block, which is its largest magnitude divided by 127 (8 bits) or by 7
    (4 bits), and rounded up::

        |x' - x| <= (1/2 + 2^-15) s + 2^-149

    Zero arrives as zero, and no number with another sign.

    Args:
        bits: 8 or 4, of each element.
        block: elements that share a scale, in the order of the vector.
        scale_dtype: torch.float32, or torch.bfloat16, which makes the steps larger by up to 2^-7.

    Raises:
        ValueError: bits, block or scale_dtype is none of these.

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
        among("bits", self.bits, (8, 4), "with 2 or 1 take hooks.averaging.contrib.Statistical")
        whole("block", self.block, least=1)
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
        rows = in_rows(wide, self.block)
        scale = self._scale(rows)
        steps = (rows / (scale + (scale == 0))).round_().clamp_(-self._last, self._last)
        codes = (steps + (self._last + 1)).to(torch.uint8).view(-1)[: wide.numel()]
        scales = to_bytes(scale.to(self.scale_dtype))
        return torch.cat((scales, pack(codes, self.bits)))

    def decode(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """See :meth:`Compression.decode`."""
        check_payload(payload, self.payload_bytes(numel), numel, dtype)
        scales, packed = split(payload, self._sizes(numel))
        scale = from_bytes(scales, self.scale_dtype).to(torch.float32).view(-1, 1)
        codes = in_rows(unpack(packed, self.bits, numel), self.block)
        steps = codes.to(torch.float32).sub_(self._last + 1)
        # The scale of the largest numbers of all, rounded up, would lead beyond them.
        rows = steps.mul_(scale).clamp_(-_LARGEST, _LARGEST)
        return rows.view(-1)[:numel].to(dtype, copy=True)

    def payload_bytes(self, numel: int) -> int:
        """See :meth:`Compression.payload_bytes`."""
        return sum(self._sizes(whole("numel", numel, least=0)))

    def error_bound(self, flat: Tensor) -> Tensor:
        """The bound of the class; see :meth:`Compression.error_bound`."""
        wide = finite_float32(flat)
        scale = self._scale(in_rows(wide, self.block)).to(torch.float64)
        bound = scale * (0.5 + 2.0**-15) + 2.0**-149
        return bound.expand(-1, self.block).reshape(-1)[: wide.numel()]

    def _sizes(self, numel: int) -> tuple[int, int]:
        """The bytes of the scales, and of the codes."""
        scales = blocks_of(numel, self.block) * self.scale_dtype.itemsize
        return scales, packed_bytes(numel, self.bits)

    def _scale(self, rows: Tensor) -> Tensor:
        """The scale of each row as it will be decoded, in float32: shape (rows, 1)."""
        wanted = rows.abs().amax(dim=1, keepdim=True).to(torch.float64) / self._last
        near = wanted.to(torch.float32)
        # The word of the next larger number is larger by one.
        words = near.view(torch.int32) + (near.to(torch.float64) < wanted)
        if self.scale_dtype == torch.bfloat16:
            words = (words + 0xFFFF) & -0x10000
        return words.view(torch.float32)
