"""Policies ``largest_first`` and ``contiguous``: near the bound, or optimal where that is known."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, combinations_with_replacement, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from functional_optim import muon
from sharding import FlopCost, ParameterSpec, plan
from sharding.makespan import largest_first_ranks, lower_bound
from tests.choices import case, examples

from .support import MODELS, of_sizes, specs

ranks = st.integers(1, 9)


def spread(items: list[int], held: list[int]) -> list[int]:
    order = sorted(range(len(items)), key=items.__getitem__, reverse=True)
    return largest_first_ranks(order, items, held)


def largest_load(owners: Sequence[int], weights: Sequence[int], loads: Sequence[int]) -> int:
    total = list(loads)
    for owner, weight in zip(owners, weights, strict=True):
        total[owner] += weight
    return max(total)


def brute_force(items: list[int], held: list[int]) -> int:
    return min(
        largest_load(owners, items, held) for owners in product(range(len(held)), repeat=len(items))
    )


@examples(25)
@given(
    st.lists(st.integers(0, 60), max_size=6),
    st.lists(st.integers(0, 40), min_size=1, max_size=3),
)
def test_the_optimum_of_few_items_is_bounded_on_both_sides(
    items: list[int], held: list[int]
) -> None:
    best = brute_force(items, held)
    assert lower_bound(items, held) <= best
    found = largest_load(spread(items, held), items, held)
    assert best <= found
    if not any(held):
        assert 3 * found <= 4 * best


@examples(15)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=60), st.integers(1, 16))
def test_it_is_within_one_large_item_of_the_bound(items: list[int], ranks: int) -> None:
    """The largest load exceeds the bound by at most one large item.

    So it is within 1 % of the bound if no item is larger than 1 % of the mean.
    """
    held = [0] * ranks
    found = largest_load(spread(items, held), items, held)
    assert ranks * found <= ranks * lower_bound(items, held) + (ranks - 1) * max(items)


@pytest.mark.parametrize("name", MODELS)
def test_real_shapes_are_within_one_percent_of_the_bound(name: str) -> None:
    numels = [spec.numel for spec in MODELS[name]]
    for ranks in (2, 3, 8, 64, 1024):
        with case(ranks=ranks):
            found = max(plan(MODELS[name], ranks).report().elements)
            assert 100 * found <= 101 * lower_bound(numels, [0] * ranks)


def test_compute_is_levelled_where_it_is_the_cost() -> None:
    """Compute is balanced if it is the cost: a square matrix costs more than a long one."""
    shapes = {"square": (64, 64), "long": (4, 1024), "other": (4, 1024)}
    parameters = [ParameterSpec(*one, kind="per_matrix") for one in shapes.items()]
    found = plan(parameters, 2, cost=FlopCost(muon()))
    assert [found.owners(path)[0].ranks for path in shapes] == [(0,), (1,), (1,)]


@examples(15)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=8), st.integers(1, 4))
def test_contiguous_runs_are_the_best_there_are(sizes: list[int], ranks: int) -> None:
    found = plan(of_sizes(*sizes), ranks, "contiguous")
    assert list(found.pieces.rank) == sorted(found.pieces.rank)
    # The same cut may be chosen twice, which gives an empty run.
    every_cut = combinations_with_replacement(range(len(sizes) + 1), ranks - 1)
    best = min(
        max(sum(sizes[a:b]) for a, b in zip((0, *cuts), (*cuts, len(sizes)), strict=True))
        for cuts in every_cut
    )
    assert max(found.report().elements) == best


def test_contiguous_runs_leave_no_rank_emptier_than_need_be() -> None:
    assert plan(of_sizes(*[1] * 30, 9), 13, "contiguous").report().elements == (3,) * 10 + (9, 0, 0)
    assert plan(of_sizes(*[2] * 10), 4, "contiguous").report().elements == (6, 6, 4, 4)


@examples(20)
@given(specs(most=8), specs(most=5), st.integers(1, 4))
def test_extended_plans_level_what_is_there_already(
    before: list[ParameterSpec], after: list[ParameterSpec], ranks: int
) -> None:
    after = [replace(spec, path=f"new.{spec.path}") for spec in after]
    first = plan(before, ranks)
    grown = first.extended(after)
    sizes, held = [spec.numel for spec in after], list(first.report().elements)
    best = brute_force(sizes, held)
    assert best <= max(grown.report().elements) == largest_load(spread(sizes, held), sizes, held)
    for spec in before:
        assert grown.owners(spec.path) == first.owners(spec.path)


def test_pairs_of_large_items_are_in_the_bound() -> None:
    for ranks in (1, 2, 5):
        items = [10] * (ranks + 1)
        assert lower_bound(items, [0] * ranks) == max(20, 10 * (ranks + 1) // ranks)
    assert all(lower_bound([a, b], [0, 0]) == max(a, b) for a, b in combinations(range(5), 2))
