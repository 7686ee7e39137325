"""Rounding to bfloat16, by the bits of float32.

The sign is the top bit of a float's word, and a larger magnitude is a larger word. So adding to
the low 16 bits and dropping them rounds away from zero as often as they run over, for both signs.

A compiler keeps a value that is rounded to bfloat16 and widened again as it was: a cast there and
back does not round. Bits do, wherever they are computed.
"""

import torch
from torch import Tensor

from functional_optim.storage.noise import Noise


def nearest(value: Tensor) -> Tensor:
    """The nearest number of bfloat16, ties to even, in float32."""
    words = value.view(torch.int32)
    odd = (words >> 16) & 1
    return _cut(value, words + (odd + 0x7FFF))


def stochastic(value: Tensor, noise: Noise, stream: int) -> Tensor:
    """Round each value stochastically to one of its two bfloat16 neighbours, in float32.

    Each is as likely as the other is far, so that the mean is the value, to 2^-16 of the distance.
    What bfloat16 can represent, infinities and NaN stay what they are.
    """
    words = value.view(torch.int32) + noise.bits(value, stream).to(torch.int32)
    return _cut(value, words)


def _cut(value: Tensor, words: Tensor) -> Tensor:
    # The words of a NaN, which equals nothing, may run over into those of zero.
    return torch.where(torch.eq(value, value), (words & -65536).view(torch.float32), value)
