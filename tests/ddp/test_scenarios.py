"""Runs that stop and go on, that step a part only, that run out of data; and more ranks."""

from typing import Any

import pytest

from tests.ranks import Job, Outcomes, run_ranks

from . import scenarios
from .cases import run_case

RESUMED = ("adamw", "sgd", "unused, momentum", "bucket views", "clip")
UNEVEN = ("adamw", "sgd", "bucket views", "all used, find_unused")
ON_FOUR = ("adamw", "unused, momentum", "bucket views", "unused, static graph", "clip")


@pytest.fixture(scope="module")
def on_two() -> Outcomes:
    jobs = {
        **{f"resumed {name}": Job(scenarios.resumed, {"name": name}) for name in RESUMED},
        **{f"uneven {name}": Job(scenarios.uneven, {"name": name}) for name in UNEVEN},
        "uneven, unused": Job(scenarios.uneven, {"name": "unused, momentum"}),
        "subset": Job(scenarios.subset),
        "small subset": Job(scenarios.small_subset),
        "nested": Job(scenarios.nested),
        "freed": Job(scenarios.freed, {"unused": False}),
        "freed, unused": Job(scenarios.freed, {"unused": True}),
    }
    return run_ranks(jobs, ranks=2, seconds=60)


@pytest.fixture(scope="module")
def on_four() -> Outcomes:
    jobs = {
        **{name: Job(run_case, {"name": name}) for name in ON_FOUR},
        "uneven": Job(scenarios.uneven, {"name": "adamw"}),
        "subgroup": Job(scenarios.on_subgroup, {"name": "unused, momentum"}),
    }
    return run_ranks(jobs, ranks=4, seconds=60)


def results(outcomes: Outcomes, job: str) -> list[Any]:
    return [outcome.result() for outcome in outcomes[job]]


@pytest.mark.parametrize("name", RESUMED)
def test_saved_and_loaded_is_never_stopped(on_two: Outcomes, name: str) -> None:
    for seen in results(on_two, f"resumed {name}"):
        assert seen["differences"] == []
        assert seen["went on"]
        assert seen["finite"]
        assert max(seen["steps"]) == 6


@pytest.mark.parametrize("name", UNEVEN)
def test_ranks_that_run_out_of_data(on_two: Outcomes, name: str) -> None:
    """Under ``ddp.join()`` a rank without data goes on stepping, as it takes part in the mean."""
    ranks = results(on_two, f"uneven {name}")
    for seen in ranks:
        assert seen["differences"] == []
        assert set(seen["steps"].values()) == {4}  # what the last rank had
    assert len({seen["digest"] for seen in ranks}) == 1


def test_unused_parameters_of_a_rank_that_ran_out_of_data(on_two: Outcomes) -> None:
    """torch takes what such a rank used last as used ever after, and steps it with zeros."""
    ranks = results(on_two, "uneven, unused")
    wanted = {"stem": 4, "both": 4, "odd": 2, "only_one": 4, "some": 1, "never": 0, "head": 4}
    for seen in ranks:
        assert {name: seen["steps"][f"{name}.weight"] for name in wanted} == wanted
    assert len({seen["digest"] for seen in ranks}) == 1


@pytest.mark.parametrize("job", ["subset", "small subset", "nested"])
def test_two_optimizers(on_two: Outcomes, job: str) -> None:
    ranks = results(on_two, job)
    for seen in ranks:
        assert seen["differences"] == [[], [], [], []]
        assert len(seen["stepped"]) == (2 if job == "nested" else 1)
        assert seen["stepped"][0]
    assert len({seen["digest"] for seen in ranks}) == 1


@pytest.mark.parametrize("job", ["freed", "freed, unused"])
def test_a_hook_does_not_keep_its_module_alive(on_two: Outcomes, job: str) -> None:
    """DDP holds the hook from C++, where Python's collector does not see a circle."""
    assert results(on_two, job) == [[], []]


@pytest.mark.parametrize("name", ON_FOUR)
def test_four_ranks(on_four: Outcomes, name: str) -> None:
    for ranks in zip(*results(on_four, name), strict=True):
        assert len({seen["digest"] for seen in ranks}) == 1
        assert len({seen["loss"] for seen in ranks}) == 4
        for seen in ranks:
            if name == "clip":
                assert seen["apart"] < 1e-12
            else:
                assert seen["differences"] == []
            assert seen["finite"]


def test_four_ranks_run_out_of_data(on_four: Outcomes) -> None:
    ranks = results(on_four, "uneven")
    assert [seen["differences"] for seen in ranks] == [[]] * 4
    assert len({seen["digest"] for seen in ranks}) == 1


def test_a_group_of_some_ranks(on_four: Outcomes) -> None:
    """Group ranks 0 and 1 are the ranks 1 and 3; the others have nothing to do with it."""
    outside, one, outside_too, three = results(on_four, "subgroup")
    assert outside == outside_too == {"group rank": None, "iterations": []}
    assert [one["group rank"], three["group rank"]] == [0, 1]
    assert len(one["iterations"]) == 7
    for first, second in zip(one["iterations"], three["iterations"], strict=True):
        assert first["differences"] == second["differences"] == []
        assert first["digest"] == second["digest"]
        assert first["loss"] != second["loss"]


def test_started_by_torchrun() -> None:
    jobs = {name: Job(run_case, {"name": name}) for name in ("adamw", "unused, momentum")}
    outcomes = run_ranks(jobs, ranks=2, seconds=60, torchrun=True)
    for name in jobs:
        for ranks in zip(*results(outcomes, name), strict=True):
            assert [seen["differences"] for seen in ranks] == [[], []]
            assert len({seen["digest"] for seen in ranks}) == 1
            assert len({seen["loss"] for seen in ranks}) == 2
