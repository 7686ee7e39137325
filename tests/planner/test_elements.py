"""``elements``: cuts at any element, equal loads, whole matrices where rules need them."""

from itertools import combinations_with_replacement
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from functional_optim import NoState, Rule, adamw, chain, sgd
from sharding import ParameterSpec, ShardPlan, Weight, Weights, plan
from sharding.makespan import level, lower_bound

from .support import MODELS, derandomized, of_sizes, specs

WORLDS = [2, 3, 8, 64, 100, 1024, 4096]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("ranks", WORLDS)
def test_real_shapes_are_level_on_any_number_of_ranks(name: str, ranks: int) -> None:
    assert plan(MODELS[name], ranks, "elements").report().imbalance("elements") <= 1.001


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("ranks", WORLDS)
def test_bytes_are_level_too_state_and_step_counts_included(name: str, ranks: int) -> None:
    optimizer = adamw()
    report = plan(MODELS[name], ranks, "elements", optimizer).report(optimizer)
    for column in ("total_bytes", "state_bytes", "parameter_bytes", "gradient_bytes"):
        assert report.imbalance(column) <= 1.001, column


@derandomized
@given(specs(), st.integers(1, 40))
def test_without_alignment_no_two_ranks_differ_by_more_than_one(
    parameters: list[ParameterSpec], ranks: int
) -> None:
    found = plan(parameters, ranks, "elements", align=1).report().elements
    assert max(found) - min(found) <= 1


@derandomized
@given(specs(largest=3000), st.integers(1, 40))
def test_by_default_the_largest_is_within_a_twentieth_of_a_percent(
    parameters: list[ParameterSpec], ranks: int
) -> None:
    found = plan(parameters, ranks, "elements").report().elements
    mean = sum(found) / ranks
    assert max(found) <= max(-(-sum(found) // ranks), 1.0005 * mean)


@derandomized
@given(specs(largest=300), st.integers(1, 20), st.integers(1, 17))
def test_cuts_are_aligned_within_each_parameter(
    parameters: list[ParameterSpec], ranks: int, align: int
) -> None:
    found = plan(parameters, ranks, "elements", align=align)
    assert all(start % align == 0 for start in found.pieces.start)
    level_up = -(-sum(spec.numel for spec in parameters) // ranks)
    assert max(found.report().elements) <= level_up + align


@derandomized
@given(specs(), st.integers(1, 12))
def test_a_rank_owns_one_range_of_each_flat_buffer(
    parameters: list[ParameterSpec], ranks: int
) -> None:
    found = plan(parameters, ranks, "elements")
    for rank in range(ranks):
        last: dict[object, tuple[int, bool]] = {}
        for one in found.owned(rank):
            spec = parameters[one.parameter]
            key = (spec.dtype, spec.device)
            buffer = [i for i, other in enumerate(parameters) if (other.dtype, other.device) == key]
            place = buffer.index(one.parameter)
            if key in last:
                before, reached_end = last[key]
                assert place == before + 1
                assert reached_end and one.start == 0
            last[key] = (place, one.stop == spec.numel)


def brute_force(weights: list[Weight], numels: list[int], ranks: int) -> int:
    """The best of all ways to cut a line of elements, of whatever price, into runs."""
    line = [(place, i) for place, numel in enumerate(numels) for i in range(numel)]

    def price(run: list[tuple[int, int]]) -> int:
        lengths: dict[int, int] = {}
        for place, _ in run:
            lengths[place] = lengths.get(place, 0) + 1
        return sum(weights[place].of(length) for place, length in lengths.items())

    return min(
        max(price(line[a:b]) for a, b in zip((0, *cuts), (*cuts, len(line)), strict=True))
        for cuts in combinations_with_replacement(range(len(line) + 1), ranks - 1)
    )


@derandomized
@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(0, 5), st.integers(0, 6)),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 3),
)
def test_the_largest_load_is_the_smallest_that_cuts_allow(
    parts: list[tuple[int, int, int]], ranks: int
) -> None:
    """Also where a rank pays for every parameter of which it has a part."""
    numels = [numel for numel, _, _ in parts]
    weights = [Weight(each, per_piece=once) for _, each, once in parts]
    parameters = of_sizes(*numels)
    columns = Weights.of_each(weights)
    found = plan(parameters, ranks, "elements", cost=lambda _: columns, align=1)
    costs = [0] * ranks
    for parameter, start, stop, rank in found.pieces.rows():
        costs[rank] += weights[parameter].of(stop - start)
    assert max(costs) == brute_force(weights, numels, ranks)


@derandomized
@given(specs(matrices=True), st.integers(1, 8))
def test_matrices_stay_whole_and_the_rest_levels(
    parameters: list[ParameterSpec], ranks: int
) -> None:
    found = plan(parameters, ranks, "elements", mixed=True, align=1)
    whole = [spec for spec in parameters if spec.kind == "per_matrix"]
    for spec in whole:
        assert len(found.owners(spec.path)) == 1
    only = plan(whole, ranks).report().elements
    rest = sum(spec.numel for spec in parameters) - sum(only)
    assert max(found.report().elements) == max(*only, level(rest, only))
    assert max(found.report().elements) >= lower_bound([spec.numel for spec in whole], [0] * ranks)


def test_matrices_are_refused_without_mixing() -> None:
    parameters = [*of_sizes(3), ParameterSpec("w", (2, 2), kind="per_matrix")]
    with pytest.raises(ValueError, match=r"'w' is per_matrix: .* give mixed=True .* 'balanced'"):
        plan(parameters, 2, "elements")


class _Plain(NamedTuple):
    lr: float


def _rule(param: Tensor, grad: Tensor, state: NoState, c: _Plain) -> tuple[Tensor, NoState]:
    return param, state


def _rule_of(**declared: object) -> object:
    return chain(Rule(name="test", hyper=_Plain, rule=_rule, **declared)(lr=0.1))


def test_what_the_optimizer_needs_whole_is_never_cut() -> None:
    needs_all = _rule_of(kind="per_matrix")
    parameters = of_sizes(9)
    with pytest.raises(ValueError, match=r"'p0' is cut .* per_matrix stage.* 'balanced'"):
        plan(parameters, 2, "elements", needs_all)
    assert plan(parameters, 2, "balanced", needs_all).is_whole
    model = torch.nn.Linear(3, 3)
    with pytest.raises(ValueError, match="'weight' is per_matrix"):
        plan(model, 2, "elements", needs_all)


def test_cuts_keep_to_the_blocks_of_the_optimizer() -> None:
    in_blocks = _rule_of(granularity=6)
    found = plan(of_sizes(100, 50), 4, "elements", in_blocks)
    assert not any(start % 6 for start in found.pieces.start)
    assert not found.is_whole
    with pytest.raises(ValueError, match="align must be a multiple of 6, .* got 4"):
        plan(of_sizes(100), 4, "elements", in_blocks, align=4)


def test_each_parameter_may_have_an_optimizer_of_its_own() -> None:
    needs_all, pointwise = _rule_of(kind="per_matrix"), sgd(0.1)
    parameters = [ParameterSpec("w", (4, 4), kind="per_matrix"), *of_sizes(16)]
    mixed = {"per_matrix": needs_all, "pointwise": pointwise}
    found = plan(parameters, 2, "elements", lambda spec: mixed[spec.kind], mixed=True)
    assert found.report().elements == (16, 16)


@pytest.mark.parametrize(("align", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError)])
def test_bad_alignments_are_refused(align: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="align must be a whole number >= 1"):
        plan(of_sizes(4), 2, "elements", align=align)


def test_aligned_shares_leave_no_rank_emptier_than_need_be() -> None:
    found = plan(of_sizes(100), 10, "elements", align=8).report().elements
    assert found == (16, 16, 16, 8, 8, 8, 8, 8, 8, 4)


def test_more_ranks_than_elements_leave_ranks_empty() -> None:
    found: ShardPlan = plan(of_sizes(2, 0, 1), 5, "elements")
    assert sorted(found.report().elements) == [0, 0, 1, 1, 1]
    assert len(found.owners("p1")) == 1
