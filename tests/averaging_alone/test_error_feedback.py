"""Error feedback, which loses nothing, but sends some parts later."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hooks.averaging.compression import TopK, with_error_feedback
from hooks.averaging.contrib import Statistical

from ..choices import case, examples
from ..tensors import normal
from .support import COMPRESSIONS, SMALLEST, arrived, vectors


@examples(10)
@given(first=vectors(bounded=True), factors=st.lists(st.floats(-2, 2, width=32), max_size=4))
def test_what_arrived_and_what_is_left_add_up_to_what_was_given(
    first: Tensor, factors: list[float]
) -> None:
    given_ = [first, *(first.flip(0) * factor for factor in factors)]
    for compression in COMPRESSIONS:
        with case(compression=compression):
            residual = torch.zeros_like(first)
            decoded = torch.zeros_like(first, dtype=torch.float64)
            room = torch.zeros_like(decoded)
            for flat in given_:
                total = flat + residual
                before = residual.clone()
                payload, new = with_error_feedback(compression, flat, residual)
                assert torch.equal(payload, compression.encode(total))
                assert torch.equal(residual, before)
                decoded += compression.decode(payload, flat.numel(), torch.float32)
                # The sum and the difference are each rounded to float32.
                room += (total.double().abs() + new.double().abs()) * 2.0**-24 + SMALLEST
                residual = new
            lost = sum(flat.double() for flat in given_) - decoded - residual
            assert (lost.abs() <= room).all()


def test_the_mean_of_what_arrives_converges_only_with_error_feedback() -> None:
    flat = normal(1000, seed=3)
    rounds = 200
    for compression in (Statistical(bits=2), Statistical(bits=1), TopK(fraction=0.05)):
        with case(compression=compression):
            residual = torch.zeros_like(flat)
            total = torch.zeros_like(flat, dtype=torch.float64)
            for _ in range(rounds):
                payload, residual = with_error_feedback(compression, flat, residual)
                total += compression.decode(payload, flat.numel(), torch.float32)
            without = (arrived(compression, flat) - flat).norm()
            error = (total / rounds - flat).norm()
            assert error < 0.1 * without
            assert error < 1.01 * residual.norm() / rounds + 1e-6


def test_the_residual_is_float32_whatever_the_vector() -> None:
    flat = torch.linspace(-3, 2, 50).to(torch.bfloat16)
    for compression in COMPRESSIONS:
        with case(compression=compression):
            payload, residual = with_error_feedback(compression, flat, torch.zeros(50))
            assert residual.dtype == torch.float32
            got = compression.decode(payload, 50, torch.float32)
            assert torch.equal(residual, flat.float() - got)
