"""Rounding to bfloat16, with random bits that are a pure function of value, gradient and step.

    h = M1 * bits(x) + M2 * bits(g) + M3 * salt + M4 * stream        (64-bit integers, no overflow)
    h = ((h xor (h >> 17)) mod 2^32) * M5
    r = (h >> 20) mod 2^16

So a step gives the same result for every split of a tensor, on every rank, and after a restart.
Two elements with the same value and the same gradient get the same bits in a step. So elements that
are equal in float32 stay equal.

Rounding works on the bits of float32. The sign is the top bit of the word of a float, and a larger
magnitude is a larger word. Adding to the low 16 bits and then dropping them rounds away from zero
if the addition carries, for both signs. A cast to bfloat16 and back would not do: a compiler
removes it.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

BITS = 16
"""Number of random bits per element."""

# Odd numbers below 2^30: |M1 * bits| and |M2 * bits| stay below 2^61, and all sums below 2^63.
_VALUE, _GRADIENT, _SALT, _STREAM, _MIX = 0x2C1B3C6D, 0x297A2D39, 0x1B873593, 0x165667B1, 0x27D4EB2F

# A salt is a whole number below 2^24, so it is exact if a kernel gets its scalars in float32.
_SALTS = 16_777_216.0
_STEP = 10_368_889.0  # odd, so that the sequence of salts has the period 2^24


def salt(step: Any, seed: int) -> Any:
    """Return a whole number below 2^24, as a float, from the step and the seed.

    The step is exact up to 5 * 10^8; it is a tensor if torch.func hides its value.
    """
    return (step * _STEP + float((seed * 7_368_787 + 1_013_904_223) % 16_777_216)) % _SALTS


class Noise(NamedTuple):
    """Common part of all random bits of a step on one tensor."""

    common: Tensor
    """int64, of the shape of the tensor: the terms of the gradient and of the step."""

    @classmethod
    def of(cls, grad: Tensor, salt: Any) -> "Noise":
        """Return the noise of a step, from a float32 gradient and the result of :func:`salt`."""
        words = grad.view(torch.int32).to(torch.int64)
        # torch.fill keeps int64. Adding a float, or a tensor of one, would give floats.
        return cls(torch.add(words * _GRADIENT, torch.fill(words, salt), alpha=_SALT))

    def bits(self, value: Tensor, stream: int) -> Tensor:
        """Return 16 random bits for each element: int64, from 0 to 65535.

        ``stream`` differs for each tensor that is rounded in the same step.
        """
        words = torch.add(self.common, value.view(torch.int32).to(torch.int64), alpha=_VALUE)
        words = words + (stream * _STREAM)
        words = ((words ^ (words >> 17)) & 0xFFFFFFFF) * _MIX
        return (words >> 20) & 0xFFFF


def round_to_nearest(value: Tensor) -> Tensor:
    """Round to the nearest bfloat16 number, ties to even. The result is float32."""
    words = value.view(torch.int32)
    odd = (words >> 16) & 1
    return _drop_low_bits(value, words + (odd + 0x7FFF))


def round_stochastically(value: Tensor, noise: Noise, stream: int) -> Tensor:
    """Round each value to one of its two bfloat16 neighbours at random. The result is float32.

    The probability of a neighbour is proportional to the distance from the other one. So the mean
    is the value, up to 2^-16 of the distance between them. Numbers of bfloat16, infinities and NaN
    do not change.
    """
    return _drop_low_bits(
        value, value.view(torch.int32) + noise.bits(value, stream).to(torch.int32)
    )


def _drop_low_bits(value: Tensor, words: Tensor) -> Tensor:
    # Keep NaN: adding to the word of a NaN may give the word of zero.
    return torch.where(torch.eq(value, value), (words & -65536).view(torch.float32), value)
