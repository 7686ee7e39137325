"""ShardPlan: every element has exactly one owner, which is easy to look up."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functional_optim import adamw
from sharding import (
    POLICIES,
    Assignment,
    ParameterSpec,
    Pieces,
    Problem,
    ShardPlan,
    plan,
    specs_of,
)
from sharding.pieces import pieces_of, whole_pieces
from tests.choices import case, examples

from .support import any_plan, of_sizes, specs

NOTHING = Pieces((), (), (), ())


def of_rows(*rows: tuple[int, int, int, int]) -> Pieces:
    return Pieces(*map(tuple, zip(*rows, strict=True)))


@examples(30)
@given(st.data())
def test_every_element_has_one_owner_in_each_replica(data: st.DataObject) -> None:
    """Every element has exactly one owner in each replica, by ``owned`` and by ``owners`` alike."""
    parameters = data.draw(specs(matrices=True))
    made = data.draw(any_plan(parameters))
    size = made.shard_ranks
    for first in range(0, made.world_size, size):
        seen = {spec.path: torch.zeros(spec.numel, dtype=torch.int64) for spec in parameters}
        pieces = dict.fromkeys(seen, 0)
        for rank in range(first, first + size):
            for one in made.owned(rank):
                seen[one.path][one.start : one.stop] += 1
                pieces[one.path] += 1
                assert one.whole == (len(made.owners(one.path)) == 1)
                assert parameters[one.parameter].path == one.path
        assert all(bool((count == 1).all()) for count in seen.values())
        assert all(pieces.values())
    by_rank = {
        (rank, one.path, one.start, one.stop)
        for rank in range(made.world_size)
        for one in made.owned(rank)
    }
    by_path = {
        (rank, spec.path, one.start, one.stop)
        for spec in parameters
        for one in made.owners(spec.path)
        for rank in one.ranks
    }
    assert by_rank == by_path


@examples(20)
@given(st.data())
def test_the_order_of_pieces_and_needless_cuts_do_not_matter(data: st.DataObject) -> None:
    parameters = data.draw(specs())
    made = data.draw(any_plan(parameters))
    rows = []
    for parameter, start, stop, rank in made.pieces.rows():
        cut = data.draw(st.integers(start, stop))
        ends = [start, cut, stop] if start < cut < stop else [start, stop]
        rows += [(parameter, one, other, rank) for one, other in pairwise(ends)]
    rows = data.draw(st.permutations(rows))
    assert replace(made, pieces=of_rows(*rows) if rows else NOTHING) == made


WRONG: list[tuple[Pieces, str]] = [
    (of_rows((0, 1, 4, 0), (1, 0, 3, 0)), r"'p0': elements \[0, 1\) have no"),
    (of_rows((0, 0, 1, 0), (0, 2, 4, 1), (1, 0, 3, 0)), r"'p0': elements \[1, 2\) have no owner"),
    (of_rows((0, 0, 4, 0), (1, 0, 2, 0)), r"'p1': elements \[2, 3\) have no"),
    (
        of_rows((0, 0, 3, 0), (0, 2, 4, 1), (1, 0, 3, 0)),
        "'p0': element 2 has two owners, rank 0 and rank 1",
    ),
    (of_rows((0, 0, 4, 0), (0, 0, 4, 0), (1, 0, 3, 0)), "'p0': element 0 has two owners"),
    (of_rows((1, 0, 3, 0)), "'p0' has no owner"),
    (of_rows((0, 0, 4, 0)), "'p1' has no owner"),
    (NOTHING, "'p0' has no owner"),
    (of_rows((0, 0, 5, 0), (1, 0, 3, 0)), r"'p0': \[0, 5\) is no range of its 4"),
    (of_rows((0, 0, 4, 0), (1, 0, -1, 0)), r"'p1': \[0, -1\) is no range"),
    (of_rows((0, 0, 0, 1), (0, 0, 4, 0), (1, 0, 3, 0)), r"'p0': \[0, 0\) is no range"),
    (of_rows((0, 0, 4, 2), (1, 0, 3, 0)), "'p0' is given to rank 2, .* 0 to 1"),
    (of_rows((0, 0, 4, 0), (1, 0, 3, -1)), "'p1' is given to rank -1"),
    (of_rows((0, 0, 4, 0), (1, 0, 3, 0), (2, 0, 1, 0)), "of parameter 2"),
    (Pieces((0, 1), (0, 0), (4, 3), (0,)), "must have one length"),
]


def test_plans_that_do_not_cover_exactly_once_are_refused() -> None:
    for pieces, message in WRONG:
        with case(pieces=pieces), pytest.raises(ValueError, match=message):
            ShardPlan(2, tuple(of_sizes(4, 3)), pieces)


def test_a_matrix_that_is_cut_is_refused() -> None:
    matrix = (ParameterSpec("w", (2, 2), kind="per_matrix"),)
    with pytest.raises(ValueError, match="'w' is cut at element 1, but its rule is per_matrix"):
        ShardPlan(2, matrix, of_rows((0, 0, 1, 0), (0, 1, 4, 1)))


def test_an_empty_parameter_has_one_owner_not_two() -> None:
    with pytest.raises(ValueError, match="'p0': its one, empty range has two owners"):
        ShardPlan(2, tuple(of_sizes(0)), of_rows((0, 0, 0, 0), (0, 0, 0, 1)))


def test_neighbours_of_one_rank_become_one_piece() -> None:
    assert pieces_of([(0, 2, 4, 1), (0, 0, 2, 1)]) == whole_pieces([4], [1])


def test_there_may_be_no_parameters_and_too_many_ranks() -> None:
    for name in POLICIES:
        options = {"node_size": 4} if name == "hierarchical" else {}
        with case(policy=name):
            assert plan([], 8, name, **options).report().elements == (0,) * (4 if options else 8)
            made = plan(of_sizes(5, 0, 1), 16 if options else 40, name, **options)
            assert sum(made.report().elements) == 6
            one_rank = plan(of_sizes(5, 0, 1), 1, name, **dict.fromkeys(options, 1))
            assert [one.path for one in one_rank.owned(0)] == ["p0", "p1", "p2"]


def test_a_world_needs_a_rank() -> None:
    wrong: list[tuple[Any, type[Exception]]]
    wrong = [(0, ValueError), (-3, ValueError), (2.0, TypeError), ("2", TypeError)]
    for world_size, error in (*wrong, (True, TypeError)):
        with (
            case(world_size=world_size),
            pytest.raises(error, match="world_size must be a whole number >= 1, got"),
        ):
            plan(of_sizes(3), world_size)


def test_unknown_policies_are_refused_with_the_names_there_are() -> None:
    with pytest.raises(ValueError, match="of greedy, largest_first, .*, hierarchical, got 'best'"):
        plan(of_sizes(3), 2, "best")
    with pytest.raises(TypeError, match="policy must be a name or a function"):
        plan(of_sizes(3), 2, 3)
    with pytest.raises(TypeError, match="align"):
        plan(of_sizes(3), 2, "greedy", align=2)


def test_paths_that_stand_twice_are_refused() -> None:
    with pytest.raises(ValueError, match="two specs, 0 and 2, have the path 'p0'"):
        plan([*of_sizes(1, 2), *of_sizes(3)], 2)


def test_a_policy_of_ones_own_is_held_to_the_same_check() -> None:
    def all_on_the_last(problem: Problem) -> Assignment:
        return Assignment(whole_pieces(problem.numels, [problem.ranks - 1] * len(problem.numels)))

    made = plan(of_sizes(3, 4), 3, all_on_the_last)
    assert made.policy == "all_on_the_last"
    assert made.report().elements == (0, 0, 7)

    def forgetful(problem: Problem) -> Assignment:
        return Assignment(Pieces((0,), (0,), (3,), (0,)))

    with pytest.raises(ValueError, match="'p1' has no owner"):
        plan(of_sizes(3, 4), 3, forgetful)
    with pytest.raises(TypeError, match="a policy returns an Assignment, got None"):
        plan(of_sizes(3), 2, lambda problem: None)


@examples(20)
@given(st.data())
def test_extended_plans_keep_what_was_owned(data: st.DataObject) -> None:
    before = data.draw(specs())
    after = [replace(spec, path=f"new.{spec.path}") for spec in data.draw(specs())]
    made = data.draw(any_plan(before))
    grown = made.extended(after)
    grown.check([*before, *after])
    assert grown.world_size == made.world_size and grown.replicas == made.replicas
    for rank in range(made.world_size):
        assert grown.owned(rank)[: len(made.owned(rank))] == made.owned(rank)


def test_extending_takes_other_policies_and_costs() -> None:
    made = plan(of_sizes(8), 2)
    new = [ParameterSpec("a", (5,)), ParameterSpec("b", (5,))]
    assert made.extended(new, policy="elements").report().elements == (9, 9)
    assert made.extended(new, optimizer=adamw()).report().elements == (8, 10)
    with pytest.raises(ValueError, match="have the path 'p0'"):
        made.extended(of_sizes(3))
    with pytest.raises(ValueError, match="extended within each"):
        made.extended(new, policy="hierarchical", node_size=1)


def test_a_plan_knows_whose_it_is() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    made = plan(model, 2)
    made.check(model)
    made.check(made.specs)
    made.check([replace(spec, device="cuda", requires_grad=False) for spec in made.specs])
    first, *others = made.specs
    for other, message in [
        ((replace(first, path="x"), *others), r"parameter 0 has path '0.weight', .* has 'x'"),
        ((replace(first, shape=(2, 3)), *others), r"'0.weight', has shape \(3, 2\)"),
        ((replace(first, dtype=torch.float64), *others), "has dtype torch.float32"),
        ((replace(first, kind="per_matrix"), *others), "has kind 'pointwise'"),
        ((replace(first, group=1), *others), "has group 0"),
        (others, "has path"),
        ((first, *others[:-1]), "the plan has '1.bias' and the other does not"),
        ((*made.specs, *of_sizes(3)), "the model given has 'p0' and the other does not"),
    ]:
        with pytest.raises(ValueError, match=f"this plan is for another model: .*{message}"):
            made.check(other)
    plan(specs_of(model, "per_matrix"), 2).check(model)  # a model has no kinds to check


def test_what_is_not_there_is_said() -> None:
    made = plan(of_sizes(3), 2)
    with pytest.raises(ValueError, match="no parameter 'x'"):
        made.owners("x")
    for rank in (2, -1, None, 0.0):
        with pytest.raises(ValueError, match="rank must be one of 0 to 1, got"):
            made.owned(rank)
    with pytest.raises(ValueError, match="replicas must divide world_size, 3, got 2"):
        ShardPlan(3, (), Pieces((), (), (), ()), replicas=2)


def test_hierarchical_plans_repeat_on_every_node() -> None:
    made = plan(of_sizes(7, 5, 3), 6, "hierarchical", node_size=2, within="elements")
    assert made.policy == "hierarchical/elements" and made.replicas == 3
    assert all(made.owned(rank) == made.owned(rank % 2) for rank in range(6))
    assert {one.ranks for one in made.owners("p0")} == {(0, 2, 4)}
    with pytest.raises(ValueError, match="node_size must divide the number of ranks, 6, got 4"):
        plan(of_sizes(7), 6, "hierarchical", node_size=4)
    with pytest.raises(ValueError, match="within must be one of greedy, .*, got 'hierarchical'"):
        plan(of_sizes(7), 6, "hierarchical", node_size=2, within="hierarchical")
    with pytest.raises(TypeError, match="node_size"):
        plan(of_sizes(7), 6, "hierarchical")


def test_a_model_on_one_device_has_specs_without_an_index() -> None:
    with torch.device("meta"):
        model = torch.nn.Linear(2, 3)
    model.bias.requires_grad_(False)
    assert specs_of(model) == (
        ParameterSpec("weight", (3, 2), device="meta"),
        ParameterSpec("bias", (3,), device="meta", requires_grad=False),
    )
    assert plan(dict(model.named_parameters()), 2) == plan(model, 2)
    mixed = {"a": torch.zeros(1), "b": torch.zeros(1, device="meta")}
    assert [spec.device for spec in specs_of(mixed)] == ["cpu", "meta"]


def test_what_has_no_parameters_is_refused() -> None:
    for things, message in (
        (3, "a plan is made for .*, got int"),
        ([torch.zeros(2)], "entry 0 must be a ParameterSpec"),
        ({"a": 3}, "made of a torch.nn.Module or a mapping"),
    ):
        with case(things=things), pytest.raises(TypeError, match=message):
            plan(things, 2)


def test_specs_of_nothing_are_refused() -> None:
    fields: dict[str, Any]
    for fields, error, message in (
        ({"path": ""}, ValueError, "at least one character"),
        ({"path": 3}, TypeError, "path must be a string, got 3"),
        ({"shape": (2, -1)}, ValueError, r"sizes >= 0, got \(2, -1\)"),
        ({"shape": (2, 1.0)}, TypeError, "whole numbers"),
        ({"shape": 5}, TypeError, "a tuple of sizes, got 5"),
        ({"dtype": "float32"}, TypeError, "must be a torch.dtype"),
        ({"kind": "rows"}, ValueError, "pointwise, per_matrix, got 'rows'"),
        ({"group": -1}, ValueError, "index of a group"),
        ({"requires_grad": "no"}, TypeError, "must be True or False, got 'no'"),
        # Fault 34: any text was accepted as a device.
        ({"device": "garbage"}, ValueError, "device of 'w' must be .*, got 'garbage'"),
        ({"device": ""}, ValueError, "got ''"),
        ({"device": "cuda one"}, ValueError, "got 'cuda one'"),
        ({"device": "cuda:0 1"}, ValueError, "got 'cuda:0 1'"),
        ({"device": 0}, ValueError, "got '0'"),
    ):
        with case(**fields), pytest.raises(error, match=message):
            ParameterSpec(**{"path": "w", "shape": (2, 3), **fields})


def test_specs_take_what_torch_has() -> None:
    spec = ParameterSpec("w", torch.Size([2, 3]), device=torch.device("cpu"))
    assert spec.shape == (2, 3) and spec.device == "cpu" and spec.numel == 6
    assert ParameterSpec("w", [4]) == ParameterSpec("w", (4,))
    for device in ("cpu", "cuda", "cuda:1", "cuda 1", "meta", "xpu"):
        assert ParameterSpec("w", (4,), device=device).device == device
