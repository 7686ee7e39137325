"""Normal random numbers as a pure function of a counter and of an element's index in its matrix.

    h = mix((index + mix(low 32 bits of the counter) + mix(mix(high bits))) mod 2^32)
    z = sqrt(2) * erfinv((2 h + 1) / 2^32 - 1)

where indices start at 1, and ``mix`` is a 32-bit hash of two multiplications. The numbers are equal
on all ranks, in all executors, and in a resumed run. The functions use no global generator.
"""

import torch
from torch import Tensor


def mix(words: Tensor) -> Tensor:
    """Return the hash of 32-bit words in int64 tensors.

    Both factors are below 2^31, so that a product with a word is below 2^63.
    """
    words = ((words ^ (words >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    words = ((words ^ (words >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return words ^ (words >> 15)


def counter_of(seed: int, like: Tensor) -> Tensor:
    """Return the counter before the first draw: a 0-d int64 tensor on the device of ``like``."""
    return torch.full((), seed, dtype=torch.int64, device=like.device) << 32


def normal_like(matrix: Tensor, counter: Tensor) -> Tensor:
    """Return normal numbers of the shape and dtype of a matrix, or of a batch of matrices.

    The counter is int64: 0-d, or of shape (n,) for a batch of n matrices.
    """
    places = torch.ones_like(matrix, dtype=torch.int64).flatten(-2).cumsum(-1)
    key = mix(counter & 0xFFFFFFFF) + mix(mix((counter >> 32) & 0xFFFFFFFF))
    words = mix((places + key.unsqueeze(-1)) & 0xFFFFFFFF)
    uniform = (2 * words + 1).to(torch.float64) * 2.0**-32 - 1.0
    numbers: Tensor = (torch.erfinv(uniform) * 2.0**0.5).to(matrix.dtype).reshape(matrix.shape)
    return numbers
