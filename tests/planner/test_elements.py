"""Policies ``elements`` and ``sliced``: cuts at any element, equal loads, some parameters whole."""

from itertools import combinations_with_replacement
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from functional_optim import NoState, Rule, adamw, chain, sgd
from sharding import ParameterSpec, Weight, Weights, plan
from sharding.makespan import level, lower_bound
from tests.choices import EVERYTHING, case, examples

from .support import MODELS, of_sizes, specs

WORLDS = [2, 3, 8, 64, 100, 1024, 4096] if EVERYTHING else [3, 64, 1024]
COLUMNS = ("elements", "total_bytes", "state_bytes", "parameter_bytes", "gradient_bytes")


@pytest.mark.parametrize("name", MODELS)
def test_real_shapes_are_level_in_elements_and_in_bytes(name: str) -> None:
    """Real models have equal elements and equal bytes on all ranks, with state and step counts."""
    optimizer = adamw()
    for ranks in WORLDS:
        with case(ranks=ranks):
            assert plan(MODELS[name], ranks, "elements").report().imbalance("elements") <= 1.001
            for policy in ("elements", *(["sliced"] if ranks <= 64 else [])):
                report = plan(MODELS[name], ranks, policy, optimizer).report(optimizer)
                assert max(report.imbalance(column) for column in COLUMNS) <= 1.001


@examples(40)
@given(specs(largest=3000), st.integers(1, 40), st.sampled_from([None, 1, 2, 8, 17]))
def test_loads_differ_by_less_than_the_alignment(
    parameters: list[ParameterSpec], ranks: int, align: int | None
) -> None:
    """Loads exceed the mean by less than the alignment.

    The default alignment keeps the largest load within 0.05 % of the mean.
    """
    found = plan(parameters, ranks, "elements", align=align)
    loads = found.report().elements
    mean, level_up = sum(loads) / ranks, -(-sum(loads) // ranks)
    if align is None:
        assert max(loads) <= max(level_up, 1.0005 * mean)
    else:
        assert all(start % align == 0 for start in found.pieces.start)
        assert max(loads) <= level_up + align
    if align == 1:
        assert max(loads) - min(loads) <= 1


@examples(20)
@given(specs(), st.integers(1, 12))
def test_a_rank_owns_one_range_of_each_flat_buffer(
    parameters: list[ParameterSpec], ranks: int
) -> None:
    found = plan(parameters, ranks, "elements")
    buffers: dict[object, list[int]] = {}
    for index, spec in enumerate(parameters):
        buffers.setdefault((spec.dtype, spec.device), []).append(index)
    for rank in range(ranks):
        last: dict[object, tuple[int, bool]] = {}
        for one in found.owned(rank):
            spec = parameters[one.parameter]
            key = (spec.dtype, spec.device)
            place = buffers[key].index(one.parameter)
            if key in last:
                before, reached_end = last[key]
                assert place == before + 1
                assert reached_end and one.start == 0
            last[key] = (place, one.stop == spec.numel)


def brute_force(weights: list[Weight], numels: list[int], ranks: int) -> int:
    """Return the smallest largest load, over all ways to cut a line of elements into runs."""
    line = [place for place, numel in enumerate(numels) for _ in range(numel)]

    def price(run: list[int]) -> int:
        return sum(weights[place].of(run.count(place)) for place in set(run))

    return min(
        max(price(line[a:b]) for a, b in zip((0, *cuts), (*cuts, len(line)), strict=True))
        for cuts in combinations_with_replacement(range(len(line) + 1), ranks - 1)
    )


@examples(20)
@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(0, 5), st.integers(0, 6)), min_size=1, max_size=4
    ),
    st.integers(1, 3),
)
def test_the_largest_load_is_the_smallest_that_cuts_allow(
    parts: list[tuple[int, int, int]], ranks: int
) -> None:
    """The largest load is the smallest possible, also if each part of a parameter has a cost."""
    numels = [numel for numel, _, _ in parts]
    weights = [Weight(each, per_piece=once) for _, each, once in parts]
    columns = Weights.of_each(weights)
    found = plan(of_sizes(*numels), ranks, "elements", cost=lambda _: columns, align=1)
    costs = [0] * ranks
    for parameter, start, stop, rank in found.pieces.rows():
        costs[rank] += weights[parameter].of(stop - start)
    assert max(costs) == brute_force(weights, numels, ranks)


# ----------------------------------------------------------------------------- whole parameters


@examples(20)
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
    matrix = ParameterSpec("m", (8, 8), kind="per_matrix")
    parameters = [*of_sizes(64), matrix]
    with pytest.raises(ValueError, match=r"'m' is per_matrix: .* mixed=True .* 'largest_first'"):
        plan(parameters, 2, "elements")
    with pytest.raises(ValueError, match="policy 'sliced' cuts parameters, but 'm' is per_matrix"):
        plan(parameters, 2, "sliced")
    found = plan(parameters, 2, "sliced", mixed=True)
    assert [(one.start, one.stop) for one in found.owners("m")] == [(0, 64)]


class _Plain(NamedTuple):
    lr: float


def _rule(param: Tensor, grad: Tensor, state: NoState, c: _Plain) -> tuple[Tensor, NoState]:
    return param, state


def _rule_of(**declared: Any) -> Any:
    return chain(Rule(name="test", hyper=_Plain, rule=_rule, **declared)(lr=0.1))


def test_what_the_optimizer_needs_whole_is_never_cut() -> None:
    needs_all = _rule_of(kind="per_matrix")
    with pytest.raises(ValueError, match=r"'p0' is cut .* per_matrix stage.* 'largest_first'"):
        plan(of_sizes(9), 2, "elements", needs_all)
    assert plan(of_sizes(9), 2, "largest_first", needs_all).is_whole
    with pytest.raises(ValueError, match="'weight' is per_matrix"):
        plan(torch.nn.Linear(3, 3), 2, "elements", needs_all)


def test_cuts_keep_to_the_blocks_of_the_optimizer() -> None:
    in_blocks = _rule_of(granularity=6)
    found = plan(of_sizes(100, 50), 4, "elements", in_blocks)
    assert not any(start % 6 for start in found.pieces.start)
    assert not found.is_whole
    with pytest.raises(ValueError, match="align must be a multiple of 6, .* got 4"):
        plan(of_sizes(100), 4, "elements", in_blocks, align=4)


def test_each_parameter_may_have_an_optimizer_of_its_own() -> None:
    mixed = {"per_matrix": _rule_of(kind="per_matrix"), "pointwise": sgd(0.1)}
    parameters = [ParameterSpec("w", (4, 4), kind="per_matrix"), *of_sizes(16)]
    found = plan(parameters, 2, "elements", lambda spec: mixed[spec.kind], mixed=True)
    assert found.report().elements == (16, 16)


# ----------------------------------------------------------------------------------- edge cases


def test_wrong_options_are_refused() -> None:
    for policy, name, value, error in (
        ("elements", "align", 0, ValueError),
        ("elements", "align", -1, ValueError),
        ("elements", "align", 1.5, TypeError),
        ("sliced", "least", 0, ValueError),
        ("sliced", "least", 1.5, TypeError),
    ):
        with (
            case(policy=policy, value=value),
            pytest.raises(error, match=f"{name} must be a whole number >= 1"),
        ):
            plan(of_sizes(64), 2, policy, **{name: value})


def test_aligned_shares_leave_no_rank_emptier_than_need_be() -> None:
    found = plan(of_sizes(100), 10, "elements", align=8).report().elements
    assert found == (16, 16, 16, 8, 8, 8, 8, 8, 8, 4)


# --------------------------------------------------------------------------------------- slices


@examples(20)
@given(
    numels=st.lists(st.integers(0, 5000), min_size=1, max_size=12),
    ranks=st.integers(1, 9),
    least=st.integers(1, 600),
)
def test_every_rank_has_an_even_slice_of_what_is_large(
    numels: list[int], ranks: int, least: int
) -> None:
    specs = of_sizes(*numels)
    found = plan(specs, ranks, "sliced", least=least, align=1)
    for spec in specs:
        if spec.numel >= ranks * least:
            owners = found.owners(spec.path)
            lengths = [one.stop - one.start for one in owners]
            assert sorted(one.ranks[0] for one in owners) == list(range(ranks))
            assert max(lengths) - min(lengths) <= 1


def test_slices_fall_on_the_blocks_of_the_rule() -> None:
    found = plan(of_sizes(1000), 3, "sliced", least=100, align=128)
    cuts = [(one.start, one.stop) for one in found.owners("p0")]
    assert cuts == [(0, 256), (256, 640), (640, 1000)]


def test_the_first_slice_goes_round() -> None:
    found = plan(of_sizes(90, 90, 90), 3, "sliced", least=1, align=1)
    assert [found.owners(f"p{place}")[0].ranks for place in range(3)] == [(0,), (1,), (2,)]
