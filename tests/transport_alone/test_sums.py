"""Tests of sums in rank order, and of when the terms of an average are divided."""

import functools
import operator

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

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
