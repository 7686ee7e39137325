"""Normal numbers that are a pure function of a counter and of an element's place in its matrix.

    h = mix((place + mix(low 32 bits of the counter) + mix(mix(high bits))) mod 2^32)
    z = sqrt(2) * erfinv((2 h + 1) / 2^32 - 1)

where ``mix`` is a 32-bit hash of two multiplications. So the numbers are the same on every rank, in
every executor, and after a resumption, and no global generator is read or changed.
"""

import torch
from torch import Tensor


def mix(words: Tensor) -> Tensor:
    """Return a hash of 32-bit words, which are kept in int64.

    Both factors are below 2^31, so that the product with a word is below 2^63.
    """
    words = ((words ^ (words >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    words = ((words ^ (words >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return words ^ (words >> 15)


def counter_of(seed: int, like: Tensor) -> Tensor:
    """Return the counter before the first draw: 0-d, int64, on the device of a tensor."""
    return torch.full((), seed, dtype=torch.int64, device=like.device) << 32


def normal_like(matrix: Tensor, counter: Tensor) -> Tensor:
    """Return normal numbers of the shape and dtype of a matrix, or of a stack of matrices.

    Args:
        matrix: one matrix, or several of one shape stacked.
        counter: int64, 0-d; of a stack, one for each matrix.
    """
    places = torch.ones_like(matrix, dtype=torch.int64).flatten(-2).cumsum(-1)
    key = mix(counter & 0xFFFFFFFF) + mix(mix((counter >> 32) & 0xFFFFFFFF))
    words = mix((places + key.unsqueeze(-1)) & 0xFFFFFFFF)
    uniform = (2 * words + 1).to(torch.float64) * 2.0**-32 - 1.0
    numbers: Tensor = (torch.erfinv(uniform) * 2.0**0.5).to(matrix.dtype).reshape(matrix.shape)
    return numbers
