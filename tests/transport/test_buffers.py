"""What a transport refuses, and what it makes of ranges: no process group needed."""

import functools
import operator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding.transport.buffers import as_bytes, as_real, check_buffer, divide, divisor_of
from sharding.transport.messages import PROBE, Numbers
from sharding.transport.ordered_sum import BLOCK, add_in_rank_order
from sharding.transport.scratch import Scratch

from .jobs import gradient, reduced, same

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@settings(derandomize=True, max_examples=150)
@given(
    st.integers(1, 6), st.integers(0, 40), st.sampled_from(DTYPES), st.integers(0, 99), st.data()
)
def test_any_rank_gets_the_sum_in_rank_order(
    size: int, numel: int, dtype: torch.dtype, seed: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, size - 1))
    terms = [gradient(q, numel, dtype, seed) for q in range(size)]
    own = terms[rank].clone()
    others = [term.clone() for q, term in enumerate(terms) if q != rank]
    divisor = data.draw(st.integers(1, 6))
    if others:
        add_in_rank_order(own, rank, others, divisor)
        terms = [term / divisor for term in terms]
    assert same(own, reduced(terms))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", range(3))
def test_sums_over_several_blocks(dtype: torch.dtype, rank: int) -> None:
    terms = [gradient(q, 2 * BLOCK + 5, dtype) for q in range(3)]
    own = terms[rank].clone()
    add_in_rank_order(own, rank, [term.clone() for q, term in enumerate(terms) if q != rank])
    assert same(own, reduced(terms))


def test_nan_and_infinity_pass_through() -> None:
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])
    terms = [values, values.flip(0), torch.zeros(4)]
    own = terms[1].clone()
    add_in_rank_order(own, 1, [terms[0].clone(), terms[2].clone()])
    expected = functools.reduce(operator.add, terms)
    assert torch.equal(own.isnan(), expected.isnan())
    assert torch.equal(own.nan_to_num(), expected.nan_to_num())


@settings(derandomize=True, max_examples=150)
@given(st.integers(1, 5), st.integers(0, 30), st.data())
def test_cut_without_overlap_is_taken_and_with_one_refused(
    size: int, numel: int, data: st.DataObject
) -> None:
    bounds = sorted(
        data.draw(st.lists(st.integers(0, numel), min_size=2 * size, max_size=2 * size))
    )
    ranges = data.draw(st.permutations([(bounds[2 * q], bounds[2 * q + 1]) for q in range(size)]))
    flat = torch.zeros(numel)
    check_buffer(flat, ranges, size)
    wide = [at for at, (start, stop) in enumerate(ranges) if stop > start]
    if wide:
        chosen = data.draw(st.sampled_from(wide))
        with pytest.raises(ValueError, match=f"overlap at element {ranges[chosen][0]}"):
            check_buffer(flat, [*ranges, ranges[chosen]], size + 1)


@pytest.mark.parametrize(
    ("flat", "ranges", "error", "text"),
    [
        ([1.0], [(0, 1)], TypeError, "flat must be a tensor, got list"),
        (torch.zeros(2, 2), [(0, 1)], ValueError, "one dimension, got shape (2, 2)"),
        (torch.zeros(4)[::2], [(0, 1)], ValueError, "strides (2,)"),
        (torch.zeros(4).to_sparse(), [(0, 1)], ValueError, "sparse"),
        (torch.zeros(2, dtype=torch.complex64).conj(), [(0, 1)], ValueError, "lazy conjugate"),
        (torch.zeros(2), [(0, 1), (1, 2)], ValueError, "each of the 1 ranks of the group, got 2"),
        (torch.zeros(2), [(0, 3)], ValueError, "group rank 0 is [0, 3), which is not within"),
        (torch.zeros(2), [(-1, 1)], ValueError, "group rank 0 is [-1, 1)"),
        (torch.zeros(2), [(2, 1)], ValueError, "group rank 0 is [2, 1)"),
    ],
)
def test_refused(flat: object, ranges: list[tuple[int, int]], error: type, text: str) -> None:
    with pytest.raises(error) as caught:
        check_buffer(flat, ranges, 1)
    assert text in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float8_e5m2])
def test_dtypes_that_are_not_summed(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=r"sums float32, float64.* got torch\."):
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


@settings(derandomize=True)
@given(st.lists(st.integers(-4, 50), max_size=40))
def test_scratch_is_bounded(wishes: list[int]) -> None:
    """Non-negative: take so many bytes; negative: give one back."""
    scratch = Scratch()
    used: list[torch.Tensor] = []
    most = 0
    for wish in wishes:
        if wish >= 0:
            used.append(scratch.take(wish))
            assert used[-1].numel() >= wish
            assert len({id(one) for one in used}) == len(used)
            most = max(most, len(used))
        elif used:
            scratch.give(used.pop(wish % len(used)))
    assert scratch.allocated_bytes <= most * max([0, *wishes])
    assert scratch.allocated_bytes >= sum(one.numel() for one in used)


def test_no_two_sequences_share_a_tag() -> None:
    """Each transport has one or two; users' tags begin at 0, and a tag is a 32-bit number."""
    group: Any = SimpleGroup()
    seen: set[int] = set()
    for _ in range(600):
        numbers = Numbers(group)
        tags = {numbers.next()[1] for _ in range(50)}
        assert len(tags) == 50 and not tags & seen
        seen |= tags
    assert min(seen) > PROBE and max(seen) < 1 << 31


class SimpleGroup:
    """Stands for a process group: it is a key, and nothing else."""


def test_complex_terms_are_divided_at_once() -> None:
    """A third of a complex number is not made of thirds of its parts."""
    flat = torch.tensor([1.0 + 2.0j, 3.0 - 1.0j, 5.0 + 0.0j], dtype=torch.complex64)
    want = flat / 3
    assert divisor_of(flat, [(0, 1), (1, 2), (2, 2)]) == 1
    assert torch.equal(flat[:2], want[:2]) and flat[2] == 5.0
    real = torch.ones(2)
    assert divisor_of(real, [(0, 1), (1, 2)]) == 2
    assert real.tolist() == [1.0, 1.0]
