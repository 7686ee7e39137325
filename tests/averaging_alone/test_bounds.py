"""Promises of a compression for each vector: its bytes, and its error."""

import torch
from hypothesis import given
from torch import Tensor

from hooks.averaging.compression import TopK

from ..choices import case, examples
from ..tensors import normal
from .support import COMPRESSIONS, LARGEST, SMALLEST, Exact, arrived, vectors


@examples(25)
@given(flat=vectors())
def test_what_arrives_is_within_the_stated_bound(flat: Tensor) -> None:
    for compression in COMPRESSIONS:
        with case(compression=compression):
            got = arrived(compression, flat)
            bound = compression.error_bound(flat)
            assert got.dtype == torch.float32 and bound.dtype == torch.float64
            assert got.shape == bound.shape == flat.shape
            assert got.isfinite().all()
            assert ((got.double() - flat.double()).abs() <= bound).all()


@examples(10)
@given(flat=vectors())
def test_the_bytes_are_known_beforehand_and_in_memory_of_their_own(flat: Tensor) -> None:
    for compression in COMPRESSIONS:
        with case(compression=compression):
            given_ = flat.clone().requires_grad_()
            payload = compression.encode(given_)
            assert payload.dtype == torch.uint8 and not payload.requires_grad
            assert payload.shape == (compression.payload_bytes(flat.numel()),)
            sent = payload.clone()
            got = compression.decode(payload, flat.numel(), torch.float32)
            decoded = got.clone()
            payload.fill_(0)
            assert torch.equal(got, decoded)
            assert torch.equal(compression.encode(given_), sent)
            got.fill_(7)
            assert torch.equal(given_, flat)


def test_bounds_are_met_where_numbers_end() -> None:
    """Bounds hold for the largest numbers, and for the smallest, where rounding steps dominate."""
    ends = [LARGEST, -LARGEST, LARGEST / 2, 0.0, -SMALLEST, SMALLEST, 3 * SMALLEST, 190 * SMALLEST]
    for compression in COMPRESSIONS:
        for flat in (*torch.tensor(ends).split(1), torch.tensor(ends), torch.tensor(ends[3:])):
            with case(compression=compression, flat=flat):
                got = arrived(compression, flat)
                error = (got.double() - flat.double()).abs()
                assert (error <= compression.error_bound(flat)).all()


def test_bounds_say_how_good_a_compression_is() -> None:
    """The bound is not loose: some element has an error near the bound."""
    flat = normal(5000, seed=4).erf()
    for compression in COMPRESSIONS:
        if not isinstance(compression, TopK):
            with case(compression=compression):
                bound = compression.error_bound(flat)
                error = (arrived(compression, flat).double() - flat.double()).abs()
                assert (bound <= 2.1 * error.max() + 2.0**-100).all()


@examples(10)
@given(flat=vectors())
def test_no_error_is_longer_than_the_vector(flat: Tensor) -> None:
    """Residuals stay bounded. For top-k, the square is at most the share that is not sent."""
    square = flat.double().square().sum()
    for compression in COMPRESSIONS:
        with case(compression=compression):
            error = (arrived(compression, flat).double() - flat.double()).square().sum()
            share = 1.0
            if isinstance(compression, TopK) and compression.values == Exact():
                share = 1 - compression.fraction
            assert error <= share * square * (1 + 1e-12)


def test_what_fills_up_the_last_block_has_no_part_in_its_bound() -> None:
    for compression in COMPRESSIONS:
        with case(compression=compression):
            if not isinstance(compression, TopK):
                flat = torch.full((1,), 5.0)
                assert compression.error_bound(flat) < 0.4


def test_zeros_arrive_as_zeros() -> None:
    for compression in COMPRESSIONS:
        for numel in (0, 1, 40, 5000):
            with case(compression=compression, numel=numel):
                assert torch.equal(arrived(compression, torch.zeros(numel)), torch.zeros(numel))


def test_short_dtypes_are_computed_in_float32() -> None:
    flat = torch.linspace(-3, 2, 50)
    for compression in COMPRESSIONS:
        for dtype in (torch.bfloat16, torch.float16):
            with case(compression=compression, dtype=dtype):
                short = flat.to(dtype)
                payload = compression.encode(short)
                assert torch.equal(payload, compression.encode(short.float()))
                wide = compression.decode(payload, 50, torch.float32)
                got = compression.decode(payload, 50, dtype)
                assert got.dtype == dtype and torch.equal(got, wide.to(dtype))
                bounds = compression.error_bound(short), compression.error_bound(short.float())
                assert torch.equal(*bounds)


def test_vectors_and_payloads_may_lie_anywhere() -> None:
    """Vectors can have any stride, and payloads can begin at any byte of a gathered buffer."""
    flat = torch.linspace(-3, 2, 50)
    for compression in COMPRESSIONS:
        with case(compression=compression):
            payload = compression.encode(flat)
            apart = flat.repeat_interleave(2)[::2]
            assert torch.equal(compression.encode(apart), payload)
            whole = torch.zeros(3 + 2 * len(payload), dtype=torch.uint8)
            for place in (whole[1 : 1 + len(payload)], whole[3::2]):
                place.copy_(payload)
                got = compression.decode(place, 50, torch.float32)
                assert torch.equal(got, compression.decode(payload, 50, torch.float32))
