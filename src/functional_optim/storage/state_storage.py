"""Storages of a field of a rule's state between steps. The rule sees it in float32.

The 8-bit code is a small float, relative to the largest magnitude ``a`` of its block of 256:

    z = s + (1 - s) * |x| / a          in [s, 1], kept with 3 bits after its leading one

In a block that holds a negative number (or minus zero), one bit is the sign, and s = 1.125 * 2^-16;
in others all 8 bits are magnitude, and s = 1.125 * 2^-32. The sign of the block's scale tells
which. Near zero the steps are even (s / 8 of ``a``), further up they are relative, an eighth at
most:

    |x - x'| <= |x| / 16 + 2^-19 a     rounded to nearest, in a block with a negative number
    |x - x'| <= |x| / 16 + 2^-34 a     in one without
    |x - x'| <= |x| / 8 + 2^-18 a      rounded stochastically (2^-34 a without a negative number)

(and one subnormal number). The largest magnitude is exact, zero is zero, what was decoded encodes
to itself, and in a block without negative numbers nothing but zero becomes zero: what is divided
by stays away from it. One value that is not finite makes its whole block not finite.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.storage.noise import BITS, Noise
from functional_optim.storage.rounding import stochastic

Parts = tuple[Tensor, ...]

BLOCK = 256
"""Elements that share a scale, in row-major order of the leaf."""


class StateStorage(NamedTuple):
    """A way of keeping a field of state."""

    name: str
    suffixes: tuple[str, ...]
    """The field is kept as one tensor for each, named with the suffix; the first has its shape."""
    encode: Callable[[Tensor, Noise | None, int], Parts]
    """``encode(value, noise, stream)``. Without noise it rounds to nearest."""
    decode: Callable[[Parts], Tensor]
    """The inverse, in float32."""
    stochastic: bool = False
    granularity: int = 1
    """Elements that are encoded together."""


def _same(value: Tensor, noise: Noise | None, stream: int) -> Parts:
    return (value,)


def _only(parts: Parts) -> Tensor:
    return parts[0]


def _nearest(value: Tensor, noise: Noise | None, stream: int) -> Parts:
    return (value.to(torch.bfloat16),)


def _stochastic(value: Tensor, noise: Noise | None, stream: int) -> Parts:
    if noise is None:
        return _nearest(value, noise, stream)
    return (stochastic(value, noise, stream).to(torch.bfloat16),)


def _widen(parts: Parts) -> Tensor:
    return parts[0].to(torch.float32)


# The words of floats, cut to 3 bits after the leading one: 1.0, and s with 8 and with 7 bits.
_CUT = 20
_BASE = 1016 - 255
_SIGN = 128  # codes of a negative number; also how much further up s lies with 7 bits


def _blocks(tensor: Tensor) -> Tensor:
    """The elements in rows of one block, the last filled up with zeros."""
    flat = tensor.reshape(-1)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)


def _unblocked(rows: Tensor, like: Tensor) -> Tensor:
    return rows.view(-1)[: like.numel()].view_as(like)


def _start(signed: Tensor) -> tuple[Tensor, Tensor]:
    """The word of s, cut, and s, for every block."""
    base = signed.to(torch.int32) * _SIGN + _BASE
    return base, (base << _CUT).view(torch.float32)


def _encode_blocks(value: Tensor, noise: Noise | None, stream: int) -> Parts:
    rows = _blocks(value)
    # The word of a float is negative where the float is, minus zero included.
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
        # Half a step of the noise is added, so that what is on a code but for rounding errors
        # of a few words stays on it.
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
"""Every way of keeping a field of state, by name."""
