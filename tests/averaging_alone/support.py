"""Every compression, and vectors with difficult values."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from hooks.averaging.compression import BFloat16, Blocks, Compression, TopK
from hooks.averaging.compression.checks import finite_float32
from hooks.averaging.contrib import Statistical

from ..tensors import normal


@dataclass(frozen=True)
class Exact:
    """Compression to the bytes of float32, which loses nothing, so that other changes show."""

    def encode(self, flat: Tensor) -> Tensor:
        return finite_float32(flat).contiguous().view(torch.uint8).clone()

    def decode(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        return payload.clone().view(torch.float32).to(dtype)

    def payload_bytes(self, numel: int) -> int:
        return 4 * numel

    def error_bound(self, flat: Tensor) -> Tensor:
        return torch.zeros_like(flat, dtype=torch.float64)


LARGEST = torch.finfo(torch.float32).max
SMALLEST = 2.0**-149

COMPRESSIONS: tuple[Compression, ...] = (
    BFloat16(),
    Blocks(),
    Blocks(bits=4, block=7),
    Blocks(bits=8, block=16, scale_dtype=torch.bfloat16),
    Blocks(bits=4, scale_dtype=torch.bfloat16),
    Statistical(),
    Statistical(bits=2, block=9, edges=(-2.25, -0.75, 0.75)),
    Statistical(bits=1, block=16),
    Statistical(bits=4, block=64),
    TopK(fraction=0.3, chunk=8),
    TopK(fraction=0.02, values=Blocks()),
    TopK(fraction=0.5, values=Statistical(block=5), chunk=16),
    TopK(fraction=1.0, values=Blocks(bits=4, block=3), chunk=5),
)

numbers = st.one_of(
    st.floats(-1.0, 1.0, width=32),
    st.floats(-LARGEST, LARGEST, width=32),
    st.integers(-400, 400).map(lambda multiple: multiple * SMALLEST),
    st.sampled_from([0.0, -0.0, 1.0, -1.0, LARGEST, -LARGEST, 2.0**-126]),
)


@st.composite
def vectors(draw: st.DrawFn, *, bounded: bool = False) -> Tensor:
    """Draw a vector: listed numbers, or numbers that spread over many magnitudes.

    Lengths are near those of blocks.

    Args:
        draw: of Hypothesis.
        bounded: draw only numbers that can be added many times.
    """
    count = draw(st.one_of(st.integers(0, 20), st.sampled_from([255, 256, 257, 1025])))
    if count <= 20 and not bounded:
        listed = st.lists(numbers, min_size=count, max_size=count)
        return torch.tensor(draw(listed), dtype=torch.float32)
    seed = draw(st.integers(0, 99))
    spread = draw(st.sampled_from([0.0, 1.0, 4.0]))
    tensor = normal(count, seed=seed) * 10 ** (spread * normal(count, seed=seed + 1))
    return tensor.abs() if draw(st.booleans()) else tensor


def arrived(compression: Compression, flat: Tensor) -> Tensor:
    """Encode and decode a vector; return the result in float32."""
    return compression.decode(compression.encode(flat), flat.numel(), torch.float32)
