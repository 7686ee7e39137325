"""Random bits that are a pure function of an element: of its value, its gradient and the step.

    h = M1 * bits(x) + M2 * bits(g) + M3 * salt + M4 * stream        (64-bit integers, no overflow)
    h = ((h xor (h >> 17)) mod 2^32) * M5
    r = (h >> 20) mod 2^16

So a step is the same however a tensor is cut, on whichever rank, and after any interruption. Two
elements with the same value and the same gradient get the same bits in a step: where float32
would keep them equal, they stay equal.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

BITS = 16
"""How many random bits an element gets."""

# Odd numbers below 2^30: |M1 * bits| and |M2 * bits| stay below 2^61, and all sums below 2^63.
_VALUE, _GRADIENT, _SALT, _STREAM, _MIX = 0x2C1B3C6D, 0x297A2D39, 0x1B873593, 0x165667B1, 0x27D4EB2F

# A salt is a whole number below 2^24: exact also where a kernel takes its numbers in float32.
_SALTS = 16_777_216.0
_STEP = 10_368_889.0  # odd, so that all 2^24 salts come before one comes again


def salt(step: Any, seed: int) -> Any:
    """Return a whole number below 2^24, as a float, from the step and the seed.

    Args:
        step: a number (or a tensor, where torch.func hides it) from 1; exact up to 5 * 10^8.
        seed: which of the sequences.
    """
    return (step * _STEP + float((seed * 7_368_787 + 1_013_904_223) % 16_777_216)) % _SALTS


class Noise(NamedTuple):
    """Common part of all random bits of a step on one tensor."""

    common: Tensor
    """int64, of the tensor's shape: the part of the gradient and of the step."""

    @classmethod
    def of(cls, grad: Tensor, salt: Any) -> "Noise":
        """The noise of a step.

        Args:
            grad: float32.
            salt: what :func:`salt` gave.
        """
        words = grad.view(torch.int32).to(torch.int64)
        # Filled in, not added: a number that comes as a float, or as a tensor of one, would make
        # floats of the words.
        return cls(torch.add(words * _GRADIENT, torch.fill(words, salt), alpha=_SALT))

    def bits(self, value: Tensor, stream: int) -> Tensor:
        """16 random bits for each element: int64, from 0 to 65535.

        Args:
            value: float32, of the gradient's shape.
            stream: tells values apart that are rounded in the same step.
        """
        words = torch.add(self.common, value.view(torch.int32).to(torch.int64), alpha=_VALUE)
        words = words + (stream * _STREAM)
        words = ((words ^ (words >> 17)) & 0xFFFFFFFF) * _MIX
        return (words >> 20) & 0xFFFF
