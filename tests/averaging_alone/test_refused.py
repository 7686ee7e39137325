"""Refusals of compressions: arguments, vectors, and payloads, with their error messages."""

from typing import Any

import pytest
import torch

from hooks.averaging.compression import BFloat16, Blocks, Compression, TopK, with_error_feedback
from hooks.averaging.contrib import Statistical

from ..choices import case
from .support import COMPRESSIONS, Exact

FLAT = torch.linspace(-1, 1, 20)


def test_vectors_that_are_not_finite_float32() -> None:
    for flat, error, words in (
        ([1.0], TypeError, "flat must be a tensor, got list"),
        (FLAT.view(4, 5), ValueError, r"must be 1-D, got shape \(4, 5\)"),
        (torch.tensor(1.0), ValueError, r"must be 1-D, got shape \(\)"),
        (FLAT.double(), ValueError, r"dtype torch.float64.*flat.float\(\)"),
        (FLAT.int(), ValueError, "dtype torch.int32"),
        (FLAT.to(torch.complex64), ValueError, "dtype torch.complex64"),
        (_with(FLAT, {7: float("nan"), 9: float("inf")}), ValueError, "element 7 of 20 is nan"),
        (_with(FLAT, {19: float("-inf")}), ValueError, "element 19 of 20 is -inf"),
        (_with(FLAT, {0: float("inf")}).bfloat16(), ValueError, "element 0 of 20 is inf"),
    ):
        for compression in COMPRESSIONS:
            with case(flat=flat, compression=compression):
                for call in (compression.encode, compression.error_bound):
                    with pytest.raises(error, match=words):
                        call(flat)  # type: ignore[arg-type]
                with pytest.raises(error, match=words):
                    with_error_feedback(compression, flat, torch.zeros(20))  # type: ignore[arg-type]


def _with(flat: torch.Tensor, changes: dict[int, float]) -> torch.Tensor:
    changed = flat.clone()
    for place, value in changes.items():
        changed[place] = value
    return changed


def test_payloads_of_another_kind_or_length() -> None:
    for compression in COMPRESSIONS:
        payload = compression.encode(FLAT)
        for given, numel, dtype, error, words in (
            (None, 20, torch.float32, TypeError, "payload must be a tensor, got NoneType"),
            (payload[:-1], 20, torch.float32, ValueError, rf"uint8 of shape \({len(payload)},\)"),
            (payload, 10_000, torch.float32, ValueError, "for 10000 elements"),
            (payload.view(1, -1), 20, torch.float32, ValueError, "shape"),
            (payload.to(torch.int8), 20, torch.float32, ValueError, "dtype torch.int8"),
            (payload, 20, torch.int64, ValueError, "floating torch.dtype, got torch.int64"),
            (payload, 20, "float32", ValueError, "floating torch.dtype, got 'float32'"),
            (payload, -1, torch.float32, ValueError, "numel must be a whole number >= 0, got -1"),
            (payload, 2.0, torch.float32, ValueError, "numel must be a whole number"),
        ):
            with case(compression=compression, words=words), pytest.raises(error, match=words):
                compression.decode(given, numel, dtype)  # type: ignore[arg-type]


def test_numbers_of_elements_that_are_none() -> None:
    for compression in COMPRESSIONS:
        for numel in (-1, 1.0, True, None):
            with case(numel=numel), pytest.raises(ValueError, match="whole number >= 0, got"):
                compression.payload_bytes(numel)  # type: ignore[arg-type]


def test_choices_that_there_are_not() -> None:
    some: Any
    for make, some, error, words in (
        (Blocks, {"bits": 2}, ValueError, "bits must be 8 or 4, got 2; .*Statistical"),
        (Blocks, {"bits": 4.0}, ValueError, "bits must be 8 or 4, got 4.0"),
        (Blocks, {"block": 0}, ValueError, "block must be a whole number >= 1, got 0"),
        (Blocks, {"scale_dtype": torch.float16}, ValueError, "scale_dtype .* got torch.float16"),
        (Statistical, {"bits": 3}, ValueError, "bits must be 2 or 1 or 4, got 3"),
        (Statistical, {"block": 2.5}, ValueError, "block must be a whole number"),
        (Statistical, {"edges": (0.0,)}, ValueError, "3 finite ascending numbers for 2 bits"),
        (Statistical, {"edges": (-1.0, 1.0, 1.0)}, ValueError, "3 finite ascending"),
        (Statistical, {"edges": (-1.0, 0.0, float("inf"))}, ValueError, "3 finite ascending"),
        (Statistical, {"edges": [-1.0, 0.0, 1.0]}, ValueError, "a tuple of 3"),
        (TopK, {"fraction": 0}, ValueError, "above 0 and at most 1, got 0"),
        (TopK, {"fraction": 1.5}, ValueError, "above 0 and at most 1, got 1.5"),
        (TopK, {"fraction": float("nan")}, ValueError, "above 0 and at most 1, got nan"),
        (TopK, {"fraction": "1%"}, ValueError, "above 0 and at most 1, got '1%'"),
        (TopK, {"fraction": 0.1, "chunk": 4097}, ValueError, "from 1 to 4096, got 4097"),
        (TopK, {"fraction": 0.1, "values": 2}, TypeError, "values must be a compression"),
        (TopK, {"fraction": 0.1, "values": BFloat16}, TypeError, "values must be a compression"),
    ):
        with case(make=make, given=some), pytest.raises(error, match=words):
            make(**some)


def test_residuals_that_do_not_belong_to_the_vector() -> None:
    for residual, error, words in (
        (None, TypeError, "residual must be a tensor, got NoneType"),
        (torch.zeros(19), ValueError, r"residual has shape \(19,\), it must have \(20,\)"),
        (torch.zeros(20).double(), ValueError, "residual has dtype torch.float64"),
        (torch.zeros(20, device="meta"), ValueError, "residual has device meta"),
        (torch.full((20,), float("nan")), ValueError, "element 0 of 20 is nan"),
    ):
        with case(residual=residual), pytest.raises(error, match=words):
            with_error_feedback(Exact(), FLAT, residual)  # type: ignore[arg-type]


def test_equal_choices_are_equal() -> None:
    for one in COMPRESSIONS:
        assert isinstance(one, Compression)
        assert [other for other in COMPRESSIONS if other == one] == [one]
        assert len({one, *COMPRESSIONS}) == len(COMPRESSIONS)
