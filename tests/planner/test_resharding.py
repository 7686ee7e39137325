"""``reshard`` and ``diff``: for any two plans, the copies on real tensors give the new shards."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sharding import ParameterSpec, RangeCopy, ShardPlan, plan, reshard, resharding
from tests.choices import examples

from .support import any_plan, of_sizes, sharded, specs, values


def carried_out(
    copies: tuple[RangeCopy, ...], held: list[dict[str, Tensor]], after: ShardPlan
) -> list[dict[str, Tensor]]:
    """Return new buffers that the copies fill. Elements that no copy writes are -1."""
    new: list[dict[str, Tensor]] = []
    for rank in range(after.world_size):
        lengths: dict[str, int] = {}
        for one in after.owned(rank):
            lengths[one.path] = lengths.get(one.path, 0) + one.stop - one.start
        new.append({path: torch.full((length,), -1) for path, length in lengths.items()})
    for copy in copies:
        source = held[copy.source][copy.path]
        target = new[copy.target][copy.path]
        assert copy.source_offset + copy.length <= source.numel()
        part = slice(copy.target_offset, copy.target_offset + copy.length)
        assert bool((target[part] == -1).all()), "an element is written twice"
        assert target[part].numel() == copy.length
        target[part] = source[copy.source_offset : copy.source_offset + copy.length]
    return new


def same(ours: list[dict[str, Tensor]], theirs: list[dict[str, Tensor]]) -> bool:
    return all(
        mine.keys() == other.keys() and all(torch.equal(mine[key], other[key]) for key in mine)
        for mine, other in zip(ours, theirs, strict=True)
    )


def elements(made: ShardPlan, rank: int) -> set[tuple[str, int]]:
    """Return all elements that a rank owns."""
    return {(one.path, at) for one in made.owned(rank) for at in range(one.start, one.stop)}


@examples(30)
@given(st.data())
def test_the_copies_give_what_direct_sharding_gives(data: st.DataObject) -> None:
    """Copies from one plan to another give the new shards, and copies back give the old shards.

    No copy moves an element to another rank that has it already.
    """
    parameters = data.draw(specs(matrices=True))
    tensors = {spec.path: values(spec) for spec in parameters}
    before = data.draw(any_plan(parameters))
    after = data.draw(any_plan(list(data.draw(st.permutations(parameters)))))
    copies = reshard(before, after)
    held = sharded(before, tensors)
    moved = carried_out(copies, held, after)
    assert same(moved, sharded(after, tensors))
    back = carried_out(reshard(after, before), moved, before)
    assert same(back, held)
    for copy in copies:
        if copy.source != copy.target and copy.target < before.world_size:
            crossed = {(copy.path, copy.start + place) for place in range(copy.length)}
            assert not crossed & elements(before, copy.target)


@examples(15)
@given(st.data())
def test_to_the_same_plan_nothing_moves(data: st.DataObject) -> None:
    made = data.draw(any_plan(data.draw(specs(matrices=True))))
    copies = reshard(made, made)
    assert all(copy.stays for copy in copies)
    assert len(copies) == len(made.pieces) * made.replicas
    assert not made.diff(made)
    assert str(made.diff(made)) == "no difference"


@examples(20)
@given(st.data())
def test_a_rank_has_its_own_copies_and_no_others(data: st.DataObject) -> None:
    parameters = data.draw(specs(matrices=True))
    before, after = data.draw(any_plan(parameters)), data.draw(any_plan(parameters))
    every = reshard(before, after)
    for rank in range(max(before.world_size, after.world_size)):
        own = [copy for copy in every if rank in (copy.source, copy.target)]
        own.sort(key=lambda one: (after.index_of(one.path), one.start, one.target))
        assert list(reshard(before, after, rank)) == own


def test_the_copies_of_a_rank_do_not_grow_with_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of copies of one rank does not grow with the number of ranks."""
    made = []
    real = resharding._range_copy

    def counting(*args: Any) -> RangeCopy:
        made.append(args)
        return real(*args)

    monkeypatch.setattr(resharding, "_range_copy", counting)
    parameters = of_sizes(*[1000] * 40)
    own, every = [], []
    for ranks in (8, 64, 512):
        before, after = (plan(parameters, count, "elements") for count in (ranks, ranks + 1))
        made.clear()
        reshard(before, after, 3)
        own.append(len(made))
        made.clear()
        reshard(before, after)
        every.append(len(made))
    assert every[2] > 512 and every[2] > 8 * every[0]
    assert own[2] <= own[0] < 40 and own[2] <= 4
    with pytest.raises(ValueError, match="rank must be one of 0 to 512, got 513"):
        reshard(before, after, 513)


def test_an_empty_parameter_moves_too() -> None:
    before, after = plan(of_sizes(3, 0), 1), plan(of_sizes(3, 0), 2, "greedy")
    assert RangeCopy("p1", 0, 0, 1, 0, 0, 0) in reshard(before, after)


def test_replicas_share_the_work_of_sending() -> None:
    parameters = of_sizes(8)
    before = plan(parameters, 4, "hierarchical", node_size=1)
    after = plan(parameters, 8, "hierarchical", node_size=1)
    assert [copy.source for copy in reshard(before, after)] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_a_rank_sends_nothing_to_a_target_that_has_it() -> None:
    parameters = of_sizes(8)
    before = plan(parameters, 4, "hierarchical", node_size=1)
    after = plan(parameters, 4, "elements")
    for rank in range(4):
        (copy,) = reshard(before, after, rank)
        assert copy.source == copy.target == rank


def test_plans_for_other_parameters_are_refused() -> None:
    made = plan(of_sizes(3, 4), 2)
    with pytest.raises(ValueError, match="the plan to go to has no parameter 'p1'"):
        reshard(made, plan(of_sizes(3), 2))
    with pytest.raises(ValueError, match="the plan to come from has no parameter 'p1'"):
        reshard(plan(of_sizes(3), 2), made)
    with pytest.raises(ValueError, match=r"'p1' has shape \(4,\) .* \(2, 2\)"):
        reshard(made, plan([*of_sizes(3), ParameterSpec("p1", (2, 2))], 2))
    with pytest.raises(ValueError, match="'p0' has shape .* torch.float32 .* torch.float64"):
        reshard(made, plan(of_sizes(3, 4, dtype=torch.float64), 2))


@examples(20)
@given(st.data())
def test_a_difference_lists_exactly_the_elements_with_other_owners(data: st.DataObject) -> None:
    parameters = data.draw(specs(matrices=True))
    before, after = data.draw(any_plan(parameters)), data.draw(any_plan(parameters))

    def owners(made: ShardPlan) -> dict[tuple[str, int], tuple[int, ...]]:
        return {
            (spec.path, element): one.ranks
            for spec in parameters
            for one in made.owners(spec.path)
            for element in range(one.start, one.stop)
        }

    ours, theirs = owners(before), owners(after)
    expected = [(*key, ours[key], theirs[key]) for key in ours if ours[key] != theirs[key]]
    found = before.diff(after)
    listed = [
        (path, element, old.ranks, new.ranks)
        for path, old, new in found.moved
        for element in range(old.start, new.stop)
    ]
    assert sorted(listed) == sorted(expected)
    assert bool(found) == (before != after)


def test_a_difference_is_told_in_words() -> None:
    before = plan(of_sizes(4, 6, 2), 2, "greedy")
    specs = [
        replace(before.specs[1], dtype=torch.float64),
        before.specs[0],
        *of_sizes(1, 1, 1, 5)[3:],
    ]
    after = plan(specs, 3, "elements")
    lines = str(before.diff(after)).splitlines()
    for line in (
        "policy: 'greedy' -> 'elements'",
        "world_size: 2 -> 3",
        "p2: only in the first plan",
        "p3: only in the second plan",
        "p1: dtype torch.float32 -> torch.float64",
        "parameters stand in another order",
    ):
        assert line in lines
    many = [ParameterSpec(f"a{place}", (1,)) for place in range(100)]
    long = str(plan(many, 2).diff(plan(of_sizes(1), 2)))
    assert len(long.splitlines()) == 20
    assert long.endswith("and 82 more differences")
