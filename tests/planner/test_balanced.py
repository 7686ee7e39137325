"""``balanced`` and ``contiguous``: never worse than greedy, near the bound, optimal where known."""

from itertools import combinations, product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from functional_optim import adamw
from sharding import ByteCost, ComputeCost, ParameterSpec, plan
from sharding.makespan import largest_load, lower_bound, searched, spread, swaps
from sharding.problem import loads_of

from .support import MODELS, TORCH, derandomized, of_sizes, specs

weights = st.lists(st.integers(0, 60), max_size=7)
loads = st.lists(st.integers(0, 40), min_size=1, max_size=3)


def brute_force(items: list[int], held: list[int]) -> int:
    return min(
        largest_load(owners, items, held) for owners in product(range(len(held)), repeat=len(items))
    )


@derandomized
@given(weights, loads)
def test_it_finds_the_optimum_of_few_items(items: list[int], held: list[int]) -> None:
    best = brute_force(items, held)
    assert largest_load(spread(items, held), items, held) == best
    assert lower_bound(items, held) <= best


@derandomized
@given(weights.filter(any), loads)
def test_the_search_alone_finds_the_optimum(items: list[int], held: list[int]) -> None:
    order = sorted(range(len(items)), key=items.__getitem__, reverse=True)
    found = searched(order, items, held, goal=0, best=sum(items) + sum(held) + 1)
    assert found is not None
    owners, height = found
    assert height == largest_load(owners, items, held) == brute_force(items, held)


@derandomized
@given(st.lists(st.integers(1, 1000), min_size=8, max_size=12), st.integers(2, 5))
def test_it_finds_an_optimum_that_was_hidden(sizes: list[int], ranks: int) -> None:
    """Shares that are equal are cut up; the pieces can be put together again, and are."""
    height = max(sizes) * 2
    items = []
    for place in range(ranks):
        cut = sizes[place % len(sizes)]
        items += [cut, height - cut]
    assert largest_load(spread(items, [0] * ranks), items, [0] * ranks) == height


@derandomized
@given(specs(most=30, largest=400), st.integers(1, 9), st.sampled_from([None, adamw()]))
def test_it_is_never_above_greedy(
    parameters: list[ParameterSpec], ranks: int, optimizer: object
) -> None:
    cost = ByteCost(optimizer) if optimizer else None
    numels = [spec.numel for spec in parameters]
    ours, greedy = (plan(parameters, ranks, policy, cost=cost) for policy in ("balanced", "greedy"))
    if cost is None:
        assert max(ours.report().elements) <= max(greedy.report().elements)
    else:
        of = [
            max(loads_of(one.pieces, numels, cost(parameters), ranks)[0]) for one in (ours, greedy)
        ]
        assert of[0] <= of[1]


@derandomized
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=300), st.integers(1, 16))
def test_it_is_within_one_large_item_of_the_bound(items: list[int], ranks: int) -> None:
    """So within 1 % wherever no item is larger than 1 % of the mean."""
    held = [0] * ranks
    found = largest_load(spread(items, held), items, held)
    assert ranks * found <= ranks * lower_bound(items, held) + (ranks - 1) * max(items)


@derandomized
@given(st.integers(1, 10), st.integers(1, 9), st.integers(0, 2**32))
def test_it_is_within_one_percent_where_no_item_is_large(ranks: int, scale: int, seed: int) -> None:
    random = Random(seed)
    items = [random.randint(10 * scale, 20 * scale) for _ in range(250 * ranks)]
    held = [0] * ranks
    assert 100 * ranks * max(items) <= sum(items)  # what the promise asks for
    assert 100 * largest_load(spread(items, held), items, held) <= 101 * lower_bound(items, held)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16, 64, 1024])
def test_real_shapes_are_within_one_percent_of_the_bound(name: str, ranks: int) -> None:
    numels = [spec.numel for spec in MODELS[name]]
    found = max(plan(MODELS[name], ranks).report().elements)
    assert 100 * found <= 101 * lower_bound(numels, [0] * ranks)


@pytest.mark.parametrize(("name", "ranks"), TORCH)
def test_it_is_never_above_torch_on_real_shapes(name: str, ranks: int) -> None:
    assert plan(MODELS[name], ranks).report().imbalance("elements") <= TORCH[name, ranks] * 1.01


def test_swaps_improve_what_moves_cannot() -> None:
    items, owners = [9, 8, 5, 4], [0, 0, 1, 1]
    found = swaps(owners, items, [0, 0], 0)
    assert largest_load(found, items, [0, 0]) == 13
    assert owners == [0, 0, 1, 1]


def test_compute_is_levelled_where_it_is_the_cost() -> None:
    """A square matrix costs more than a long one with as many elements."""
    parameters = [
        ParameterSpec("square", (64, 64), kind="per_matrix"),
        ParameterSpec("long", (4, 1024), kind="per_matrix"),
        ParameterSpec("other", (4, 1024), kind="per_matrix"),
    ]
    found = plan(parameters, 2, cost=ComputeCost())
    assert [found.owners(path)[0].ranks for path in ("long", "other")] == [(1,), (1,)]
    assert found.owners("square")[0].ranks == (0,)


@derandomized
@given(st.lists(st.integers(0, 30), min_size=1, max_size=8), st.integers(1, 4))
def test_contiguous_runs_are_the_best_there_are(sizes: list[int], ranks: int) -> None:
    found = plan(of_sizes(*sizes), ranks, "contiguous")
    assert list(found.pieces.rank) == sorted(found.pieces.rank)
    best = min(
        max(sum(sizes[a:b]) for a, b in zip((0, *cuts), (*cuts, len(sizes)), strict=True))
        for cuts in map(sorted, _cuts(len(sizes), ranks - 1))
    )
    assert max(found.report().elements) == best


def _cuts(length: int, number: int) -> list[tuple[int, ...]]:
    """Every choice of places to cut at; one may be chosen twice, for an empty run."""
    from itertools import combinations_with_replacement

    return list(combinations_with_replacement(range(length + 1), number))


def test_contiguous_runs_leave_no_rank_emptier_than_need_be() -> None:
    assert plan(of_sizes(*[1] * 30, 9), 13, "contiguous").report().elements == (3,) * 10 + (9, 0, 0)
    assert plan(of_sizes(*[2] * 10), 4, "contiguous").report().elements == (6, 6, 4, 4)


@derandomized
@given(specs(most=8), specs(most=8), st.integers(1, 4))
def test_extended_plans_level_what_is_there_already(
    before: list[ParameterSpec], after: list[ParameterSpec], ranks: int
) -> None:
    from dataclasses import replace

    after = [replace(spec, path=f"new.{spec.path}") for spec in after]
    first = plan(before, ranks)
    grown = first.extended(after)
    held = list(first.report().elements)
    sizes = [spec.numel for spec in after]
    if len(after) <= 5:
        assert max(grown.report().elements) == brute_force(sizes, held)
    for spec in before:
        assert grown.owners(spec.path) == first.owners(spec.path)


def test_pairs_of_large_items_are_in_the_bound() -> None:
    for ranks in (1, 2, 5):
        items = [10] * (ranks + 1)
        assert lower_bound(items, [0] * ranks) == max(20, 10 * (ranks + 1) // ranks)
    assert all(lower_bound([a, b], [0, 0]) == max(a, b) for a, b in combinations(range(5), 2))
