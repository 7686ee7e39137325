"""Buffers that differ on every rank, ways to cut them, and sums by one process."""

import functools
import operator

import torch
from torch import Tensor

DTYPES = ["float32", "float64", "bfloat16", "float16", "complex64", "complex128"]
CUTS = {
    "even": lambda n, size: [(n * q // size, n * (q + 1) // size) for q in range(size)],
    "all to the last": lambda n, size: [(0, 0)] * (size - 1) + [(0, n)],
    "first owns nothing": lambda n, size: [
        (0, 0),
        *((n * q // (size - 1), n * (q + 1) // (size - 1)) for q in range(size - 1)),
    ],
    "backwards, with gaps": lambda n, size: [
        (n * (size - 1 - q) // size + 1, n * (size - q) // size - 2) for q in range(size)
    ],
}


def gradient(rank: int, n: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return a rank's buffer, with values of very different size, so that sums depend on order."""
    chance = torch.Generator().manual_seed(17 * seed + rank)
    # bfloat16 and float16 would lose all digits, or overflow, with a larger spread
    spread = 2.0 if dtype in (torch.bfloat16, torch.float16) else 6.0
    real = torch.randn(2, n, generator=chance, dtype=torch.float64)
    real *= 10 ** (spread * (torch.rand(2, n, generator=chance, dtype=torch.float64) - 0.5))
    return (torch.complex(*real) if dtype.is_complex else real[0]).to(dtype)


def reduced(terms: list[Tensor]) -> Tensor:
    """Add the ranks' buffers in order, as one process does."""
    if terms[0].dtype in (torch.bfloat16, torch.float16):
        wide = [term.float() for term in terms]
        return functools.reduce(operator.add, wide).to(terms[0].dtype)
    return functools.reduce(operator.add, terms)


def same(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors are equal bit for bit."""
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.contiguous().view(torch.uint8)
