"""Policy ``two_resource``: each element has one owner, and time and bytes are near their bounds."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.matrix_plans import MODELS, RANKS, rule
from functional_optim import Optimizer, adamw, muon, sgd
from sharding import (
    Costs,
    ElementCost,
    FlopCost,
    MatrixBlocks,
    ParameterSpec,
    StepCost,
    Weight,
    Weights,
    plan,
)
from tests.choices import case, examples

from .support import of_sizes


@st.composite
def blocks_of_rows(draw: st.DrawFn, rows: int) -> MatrixBlocks | None:
    """Draw a division of the rows of a matrix, or None."""
    divisors = [count for count in range(1, rows + 1) if rows % count == 0]
    cuts = sorted(draw(st.sets(st.integers(1, max(1, rows - 1)), max_size=3))) if rows > 1 else []
    ends = [0, *cuts, rows]
    sizes = tuple(b - a for a, b in itertools.pairwise(ends))
    equal = [MatrixBlocks(row_blocks=count) for count in divisors]
    return draw(st.sampled_from([None, *equal, MatrixBlocks(split_sizes=sizes)]))


@st.composite
def model(draw: st.DrawFn) -> list[ParameterSpec]:
    """Draw matrices with and without blocks, stacks of experts, and pointwise parameters."""
    specs = []
    for number in range(draw(st.integers(0, 5))):
        rows, columns = draw(st.integers(1, 12)), draw(st.integers(1, 6))
        if draw(st.booleans()):
            blocks = draw(blocks_of_rows(rows))
            shape: tuple[int, ...] = (rows, columns)
        else:
            shape, blocks = (draw(st.integers(1, 4)), rows, columns), MatrixBlocks(batch_axes=1)
        trained = draw(st.booleans())
        specs.append(
            ParameterSpec(
                f"m{number}", shape, requires_grad=trained, kind="per_matrix", blocks=blocks
            )
        )
    sizes = draw(st.lists(st.integers(0, 60), max_size=4))
    return draw(st.permutations([*specs, *of_sizes(*sizes)]))


def small(spec: ParameterSpec) -> Optimizer:
    if spec.kind == "pointwise":
        return adamw()
    return muon(batch_axes=1) if len(spec.shape) == 3 else muon()


@examples(40)
@given(model(), st.integers(1, 9), st.booleans())
def test_each_element_has_one_owner_and_blocks_stay_whole(
    specs: list[ParameterSpec], ranks: int, with_optimizer: bool
) -> None:
    made = plan(specs, ranks, "two_resource", small if with_optimizer else None)
    owned = [
        (one.path, element)
        for rank in range(ranks)
        for one in made.owned(rank)
        for element in range(one.start, one.stop)
    ]
    assert sorted(owned) == sorted((spec.path, k) for spec in specs for k in range(spec.numel))
    for spec in specs:
        if spec.kind == "per_matrix":
            starts = {one.start for one in made.owners(spec.path)}
            assert starts <= set(spec.bounds)
    back = type(made).from_json(made.to_json())
    assert back == made and back.digest == made.digest


@examples(25)
@given(model(), st.integers(1, 6), st.sampled_from(["two_resource", "largest_first", "greedy"]))
def test_the_largest_rank_is_never_below_the_bound(
    specs: list[ParameterSpec], ranks: int, policy: str
) -> None:
    """No plan that leaves matrices whole is better than the lower bounds of time and memory."""
    numbers = plan(specs, ranks, policy, small).report(small)
    assert numbers.flops_bound <= numbers.makespan
    assert numbers.bytes_bound <= numbers.memory
    assert numbers.makespan_over_bound >= 1.0 and numbers.memory_over_bound >= 1.0


@examples(25)
@given(model(), st.integers(1, 5))
def test_time_is_within_one_matrix_of_the_bound(specs: list[ParameterSpec], ranks: int) -> None:
    """For matrices alone, the makespan exceeds its bound by at most one matrix.

    One of the three orders has this guarantee, so the plan that is chosen has it too.
    """
    specs = [spec for spec in specs if spec.kind == "per_matrix" and spec.requires_grad]
    cost = FlopCost(small)
    made = plan(specs, ranks, "two_resource", cost=cost)
    numbers = made.report(small)
    matrices = [small_flops(spec) for spec in specs]
    assert numbers.makespan <= numbers.flops_bound + max(map(max, matrices), default=0)


def small_flops(spec: ParameterSpec) -> list[int]:
    shapes = [spec.shape] if spec.blocks is None else spec.blocks.shapes(spec.shape)
    return [flops(*shape) for shape in shapes]


def flops(rows: int, columns: int) -> int:
    short, long = sorted((rows, columns))
    return 5 * (4 * short**2 * long + 2 * short**3)


def test_flops_and_bytes_of_blocks_are_those_of_matrices_of_their_shape() -> None:
    alone = [ParameterSpec(f"b{k}", (3, 8), kind="per_matrix") for k in range(4)]
    divided = [ParameterSpec("w", (12, 8), kind="per_matrix", blocks=MatrixBlocks(row_blocks=4))]
    for rule_of_blocks in (muon(), muon(row_blocks=4), muon(split_sizes=(3, 3, 3, 3))):
        with case(rule=rule_of_blocks):
            ours = plan(divided, 2, "two_resource", rule_of_blocks).report(rule_of_blocks)
            theirs = plan(alone, 2, "two_resource", muon()).report(muon())
            assert ours.flops == theirs.flops == (2 * flops(3, 8),) * 2
            assert ours.total_bytes == theirs.total_bytes
            assert ours.flops_bound == theirs.flops_bound


def test_blocks_that_the_rule_does_not_have_are_refused() -> None:
    divided = [ParameterSpec("w", (12, 8), kind="per_matrix", blocks=MatrixBlocks(row_blocks=4))]
    with pytest.raises(ValueError, match=r"'w' is declared with .* muon_options divides it by"):
        plan(divided, 2, "two_resource", muon(row_blocks=3))


def test_a_plan_that_grows_levels_both_resources() -> None:
    matrices = [ParameterSpec(f"m{k}", (8, 8), kind="per_matrix") for k in range(4)]
    made = plan(matrices[:1], 2, "two_resource", small)
    grown = made.extended([*matrices[1:], *of_sizes(400)], optimizer=small)
    assert grown.owners("m0") == made.owners("m0")
    numbers = grown.report(small)
    assert numbers.flops_bound == numbers.makespan == 2 * flops(8, 8) + small_step(400)
    assert numbers.imbalance() < 1.01


def small_step(elements: int) -> int:
    """Return the operations of AdamW on half of the elements, the share of each rank."""
    (count,) = FlopCost(adamw())(of_sizes(elements)).whole([elements])
    return count // 2


def test_costs_of_any_kind_are_levelled() -> None:
    specs = of_sizes(6, 6)

    def pair(given: Any) -> Costs:
        return Costs(ElementCost()(given), Weights((Weight(2),), (0,) * len(given)))

    assert plan(specs, 2, "two_resource", cost=pair).report().elements == (6, 6)
    time, size = StepCost(sgd(0.1))(specs)
    assert (time.whole([6, 6]), size.whole([6, 6])) == ([12, 12], [56, 56])
    with pytest.raises(TypeError, match="a cost model returns Weights or Costs, got 3"):
        plan(specs, 2, cost=lambda given: 3)


@pytest.mark.parametrize("name", MODELS)
def test_real_models_reach_their_bounds(name: str) -> None:
    """Real models come within 10 % of both bounds.

    They also meet the targets for the imbalance where the bounds allow it.
    """
    numbers = plan(MODELS[name](), RANKS, "two_resource", rule).report(rule)
    assert numbers.makespan_over_bound <= 1.1
    assert numbers.memory_over_bound <= 1.1
    if name in ("GPT-2 medium, Q, K, V", "GPT-2 XL, Q, K, V"):
        assert numbers.imbalance("flops") <= 1.1
        assert numbers.imbalance() <= 1.1
    if name == "Llama-8B":
        assert numbers.imbalance("flops") <= 1.06
        assert numbers.imbalance() <= 1.0005
