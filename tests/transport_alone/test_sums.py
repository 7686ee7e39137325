"""Tests of sums in rank order, and of when the terms of an average are divided."""

import functools
import operator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sharding.transport.buffers import as_bytes, as_real, divide, prepare_average
from sharding.transport.ordered_sum import BLOCK, add_in_rank_order
from tests.choices import case, examples
from tests.transport.buffers import gradient, reduced, same

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def added(terms: list[Tensor], rank: int, divisor: int = 1) -> Tensor:
    """Return the sum of all terms in rank order, as one rank computes it."""
    own = terms[rank].clone()
    others = [term.clone() for place, term in enumerate(terms) if place != rank]
    add_in_rank_order(own, rank, others, divisor)
    return own


@examples(40)
@given(
    st.integers(2, 6), st.integers(0, 40), st.sampled_from(DTYPES), st.integers(0, 99), st.data()
)
def test_any_rank_gets_the_sum_in_rank_order(
    size: int, numel: int, dtype: torch.dtype, seed: int, data: st.DataObject
) -> None:
    rank, divisor = data.draw(st.integers(0, size - 1)), data.draw(st.integers(1, 6))
    terms = [gradient(q, numel, dtype, seed) for q in range(size)]
    assert same(added(terms, rank, divisor), reduced([term / divisor for term in terms]))


def test_sums_over_several_blocks() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        terms = [gradient(q, 2 * BLOCK + 5, dtype) for q in range(3)]
        whole = reduced(terms)
        for rank in range(3):
            with case(dtype=dtype, rank=rank):
                assert same(added(terms, rank), whole)


def test_nan_and_infinity_pass_through() -> None:
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])
    terms = [values, values.flip(0), torch.zeros(4)]
    own, expected = added(terms, 1), functools.reduce(operator.add, terms)
    assert torch.equal(own.isnan(), expected.isnan())
    assert torch.equal(own.nan_to_num(), expected.nan_to_num())


def test_dtypes_that_are_not_summed() -> None:
    for dtype in (torch.int32, torch.bool, torch.float8_e5m2):
        with (
            case(dtype=dtype),
            pytest.raises(TypeError, match=r"sums float32, float64.* got torch\."),
        ):
            as_real(torch.zeros(2).to(dtype), [(0, 2)])


def test_views_share_memory_and_scale_ranges() -> None:
    flat = torch.zeros(3, dtype=torch.complex64)
    real, cuts = as_real(flat, [(1, 3)])
    real[slice(*cuts[0])] = 1.0
    assert flat.tolist() == [0, 1 + 1j, 1 + 1j]
    raw, cuts = as_bytes(flat, [(1, 3)])
    raw[slice(*cuts[0])] = 0
    assert flat.tolist() == [0, 0, 0]
    assert raw.numel() == 24 and cuts == [(8, 24)]


def test_division_leaves_what_nobody_owns() -> None:
    flat = torch.ones(4)
    divide(flat, [(0, 1), (2, 4)])
    assert flat.tolist() == [0.5, 1.0, 0.5, 0.5]


def test_complex_terms_are_divided_at_once() -> None:
    """Real and imaginary parts divided separately give other bits than a complex division."""
    flat = torch.tensor([1.0 + 2.0j, 3.0 - 1.0j, 5.0 + 0.0j], dtype=torch.complex64)
    want = flat / 3
    assert prepare_average(flat, [(0, 1), (1, 2), (2, 2)]) == 1
    assert torch.equal(flat[:2], want[:2]) and flat[2] == 5.0
    real = torch.ones(2)
    assert prepare_average(real, [(0, 1), (1, 2)]) == 2
    assert real.tolist() == [1.0, 1.0]
