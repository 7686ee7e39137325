"""Tests of ZeRO with torch.distributed.checkpoint, over chains, policies and numbers of ranks."""

from pathlib import Path

import pytest

from tests.choices import case
from tests.ranks import Job, Outcomes, run_ranks

from . import laws
from .runs import folder_of

CUT, WHOLE = ("elements", "sliced", "greedy"), ("greedy", "largest_first", "contiguous")
NOT_CUT = ("partition", "whole", "clipped")
"""Chains that need whole parameters, or a norm that is summed parameter by parameter."""
CASES = {
    name: (policies[number % 3], policies[(number + 1) % 3])
    for number, name in enumerate(laws.NAMES)
    for policies in [WHOLE if name in NOT_CUT else CUT]
}
"""Policy of the run that saves, and policy of the run that loads."""
ONCE = (
    laws.by_number,
    laws.flattened,
    laws.with_missing_state,
    laws.every_range_is_offered_once,
    laws.of_other_ranges,
    laws.damaged,
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("laws")


@pytest.fixture(scope="module")
def on_three(base: Path) -> Outcomes:
    jobs = {
        name: Job(
            laws.saves, {"name": name, "policy": CASES[name][0], "folder": folder_of(base, name)}
        )
        for name in CASES
    }
    once = {one.__name__: Job(one, {"folder": folder_of(base, one.__name__)}) for one in ONCE}
    return run_ranks({**jobs, **once}, ranks=3, seconds=90)


@pytest.fixture(scope="module")
def on_two(base: Path, on_three: Outcomes) -> Outcomes:
    jobs = {
        name: Job(
            laws.goes_on, {"name": name, "policy": CASES[name][1], "folder": folder_of(base, name)}
        )
        for name in CASES
    }
    return run_ranks(jobs, ranks=2, seconds=90)


@pytest.fixture(scope="module")
def on_four(base: Path) -> Outcomes:
    jobs = {
        "data": Job(laws.other_data_on_every_rank, {"folder": folder_of(base, "data")}),
        "subgroup": Job(laws.on_subgroup, {"folder": folder_of(base, "subgroup")}),
    }
    return run_ranks(jobs, ranks=4, seconds=90)


@pytest.mark.parametrize("name", laws.NAMES)
def test_goes_on_as_if_it_had_never_stopped(
    on_three: Outcomes, on_two: Outcomes, name: str
) -> None:
    """Two ranks with another policy continue exactly from a checkpoint that three ranks saved."""
    assert [outcome.result() for outcome in on_three[name]] == [None] * 3
    assert [outcome.result() for outcome in on_two[name]] == [[], []]


@pytest.mark.parametrize("name", [one.__name__ for one in ONCE[:3]])
def test_other_ways_to_save(on_three: Outcomes, name: str) -> None:
    for outcome in on_three[name]:
        outcome.result()


def test_four_ranks_with_other_data_on_each(on_four: Outcomes) -> None:
    assert len({outcome.result() for outcome in on_four["data"]}) == 1


def test_subgroups_whose_ranks_are_others(on_four: Outcomes) -> None:
    found = [outcome.result() for outcome in on_four["subgroup"]]
    assert found == [[0, 0], None, [1, 2], [2, 3]]


def test_each_rank_offers_its_own_ranges(on_three: Outcomes) -> None:
    found = [
        tuple(one)
        for outcome in on_three["every_range_is_offered_once"]
        for one in outcome.result()
    ]
    assert len(set(found)) == len(found) > 3


def test_parts_of_another_plan_are_refused(on_three: Outcomes) -> None:
    """All ranks raise an error that names the rank, the parameter and the solution."""
    for rank, outcome in enumerate(on_three["of_other_ranges"]):
        for text in outcome.result():
            told = f"group rank {rank} (global rank {rank}) was given a part of the state of 'embed"
            assert told in text and "save it with torch.distributed.checkpoint" in text


def test_what_cannot_be_loaded_changes_nothing(on_three: Outcomes) -> None:
    for outcome in on_three["damaged"]:
        with case(outcome=outcome):
            lacking, shape, cut = outcome.result()
            assert "sum" in lacking
            assert "Size mismatch" in shape and "last.weight" in shape
            assert "rank" in cut
