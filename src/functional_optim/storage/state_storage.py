"""Storages of a state field between steps. A rule gets the field in float32.

The 8-bit code is a small float, relative to the largest magnitude ``a`` of its block of 256:

    z = s + (1 - s) * |x| / a          in [s, 1], kept with 3 bits after its leading one

A block with a negative number (or minus zero) has a sign bit, and s = 1.125 * 2^-16. In all other
blocks the 8 bits are magnitude, and s = 1.125 * 2^-32. The sign of the scale of a block says which
code it has. Near zero, codes are evenly spaced (s / 8 of ``a``). Further up, their distance is at
most an eighth of the value:

    |x - x'| <= |x| / 16 + 2^-19 a     rounded to nearest, in a block with a negative number
    |x - x'| <= |x| / 16 + 2^-34 a     in one without
    |x - x'| <= |x| / 8 + 2^-18 a      rounded stochastically (2^-34 a without a negative number)

(and one subnormal number). The largest magnitude and zero are exact. A decoded value encodes to the
same code. In a block without negative numbers only zero becomes zero, so a divisor stays above
zero. One value that is not finite makes its whole block not finite.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.storage.rounding import BITS, Noise, round_stochastically

Parts = tuple[Tensor, ...]

BLOCK = 256
"""Number of elements that share a scale, in row-major order."""


class StateStorage(NamedTuple):
    """Storage of a field of the state."""

    name: str
    suffixes: tuple[str, ...]
    """Suffixes of the names of the encoded tensors. The first tensor has the shape of the field."""
    encode: Callable[[Tensor, Noise | None, int], Parts]
    """``encode(value, noise, stream)`` returns one tensor per suffix. Without noise it rounds to
    nearest."""
    decode: Callable[[Parts], Tensor]
    """Returns the field in float32."""
    stochastic: bool = False
    granularity: int = 1
    """Number of elements that are encoded together."""


def _same(value: Tensor, noise: Noise | None, stream: int) -> Parts:
    return (value,)


def _only(parts: Parts) -> Tensor:
    return parts[0]


def _nearest(value: Tensor, noise: Noise | None, stream: int) -> Parts:
    return (value.to(torch.bfloat16),)


def _stochastic(value: Tensor, noise: Noise | None, stream: int) -> Parts:
    if noise is None:
        return _nearest(value, noise, stream)
    return (round_stochastically(value, noise, stream).to(torch.bfloat16),)


def _widen(parts: Parts) -> Tensor:
    return parts[0].to(torch.float32)


_CUT = 20
"""Low bits of the word of a float that a code leaves out. 3 bits after the leading one stay."""
_BASE = 1016 - 255
"""The high bits of the word of s, with 8 bits of magnitude. Those of 1.0 are 1016."""
_SIGN = 128
"""The sign bit of a code. With 7 bits of magnitude, the high bits of s are larger by this."""


def _blocks(tensor: Tensor) -> Tensor:
    """Return the elements as rows of one block each. The last row is padded with zeros."""
    flat = tensor.reshape(-1)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)


def _unblocked(rows: Tensor, like: Tensor) -> Tensor:
    return rows.view(-1)[: like.numel()].view_as(like)


def _start(signed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the high bits of the word of s, and s, for each block."""
    base = signed.to(torch.int32) * _SIGN + _BASE
    return base, (base << _CUT).view(torch.float32)


def _encode_blocks(value: Tensor, noise: Noise | None, stream: int) -> Parts:
    rows = _blocks(value)
    # The word of a float is negative if the float is negative or minus zero.
    sign = rows.view(torch.int32)
    signed = sign.amin(dim=1, keepdim=True) < 0
    magnitude = rows.abs()
    largest = magnitude.amax(dim=1, keepdim=True)
    base, start = _start(signed)
    share = magnitude / (largest + (largest == 0))
    words = torch.addcmul(start, share, 1 - start).view(torch.int32)
    if noise is None:
        words = words + (1 << (_CUT - 1))
    else:
        # Add half a step of the noise, so that a value which differs from a code only by a few
        # rounding errors keeps this code.
        room = _CUT - BITS
        step = (_blocks(noise.bits(value, stream)) << room) + (1 << (room - 1))
        words = words + step.to(torch.int32)
    codes = (words >> _CUT) - base
    codes = torch.maximum(codes, ((magnitude > 0) > signed).to(torch.int32))
    codes = (codes + ((sign >> 24) & _SIGN)).to(torch.uint8)
    return _unblocked(codes, value), torch.where(signed, -largest, largest).view(-1)


def _encode_nearest(value: Tensor, noise: Noise | None, stream: int) -> Parts:
    return _encode_blocks(value, None, stream)


def _decode_blocks(parts: Parts) -> Tensor:
    codes, scale = parts[0], parts[1].view(-1, 1)
    rows = _blocks(codes).to(torch.int32)
    signed = scale.signbit()
    base, start = _start(signed)
    last = 255 - signed.to(torch.int32) * _SIGN
    words = ((rows & last) + base) << _CUT
    value = (words.view(torch.float32) - start) * (1 / (1 - start)) * scale.abs()
    return _unblocked(torch.where(rows > last, -value, value), codes)


def are_codes(value: Tensor) -> bool:
    """Return True if numbers are 8-bit codes, converted to a float dtype without their scales.

    Every code is an integer below 256, and each block has the code of its largest element.
    """
    rows = _blocks(value.detach())
    if not bool(((rows == rows.trunc()) & (rows >= 0) & (rows < 2 * _SIGN)).all()):
        return False
    magnitude = rows % _SIGN
    is_zero = magnitude.amax(dim=1) == 0
    return bool((is_zero | (magnitude == _SIGN - 1).any(dim=1)).all())


STATE_STORAGES: dict[str, StateStorage] = {
    one.name: one
    for one in (
        StateStorage("float32", ("",), _same, _only),
        StateStorage("bfloat16", ("",), _nearest, _widen),
        StateStorage("bfloat16+stochastic", ("",), _stochastic, _widen, True),
        StateStorage("int8", ("", "_scale"), _encode_nearest, _decode_blocks, granularity=BLOCK),
        StateStorage(
            "int8+stochastic", ("", "_scale"), _encode_blocks, _decode_blocks, True, BLOCK
        ),
    )
}
"""All storages of state fields, by name."""
