"""Runs that stop and resume, step a part, run out of data, or fail; and runs on four ranks."""

from typing import Any

import pytest

from tests.choices import case
from tests.ranks import Job, Outcomes, run_ranks

from . import scenarios
from .cases import run_cases

RESUMED = ("adamw", "unused, momentum", "bucket views", "clip")
UNEVEN = ("adamw", "bucket views", "all used, find_unused", "unused, momentum")
ON_FOUR = ("adamw", "unused, momentum", "unused, static graph", "clip")


@pytest.fixture(scope="module")
def on_two() -> Outcomes:
    jobs = {
        "resumed": Job(scenarios.each, {"scenario": "resumed", "names": RESUMED}),
        "uneven": Job(scenarios.each, {"scenario": "uneven", "names": UNEVEN}),
        "subset": Job(scenarios.subset),
        "small subset": Job(scenarios.small_subset),
        "nested": Job(scenarios.nested),
        "freed": Job(scenarios.freed, {"unused": False}),
        "freed, unused": Job(scenarios.freed, {"unused": True}),
        "one fails": Job(scenarios.one_fails, {"rank_that_fails": 1, "leaves": False}, 2),
    }
    return run_ranks(jobs, ranks=2, seconds=120)


@pytest.fixture(scope="module")
def on_four() -> Outcomes:
    jobs = {
        "cases": Job(run_cases, {"names": ON_FOUR}),
        "uneven": Job(scenarios.uneven, {"name": "adamw"}),
        "subgroup": Job(scenarios.on_subgroup, {"name": "unused, momentum"}),
    }
    return run_ranks(jobs, ranks=4, seconds=120)


def results(outcomes: Outcomes, job: str) -> list[Any]:
    return [outcome.result() for outcome in outcomes[job]]


def test_saved_and_loaded_is_never_stopped(on_two: Outcomes) -> None:
    for rank in results(on_two, "resumed"):
        for name, seen in rank.items():
            with case(name=name):
                assert seen["differences"] == []
                assert seen["went on"]
                assert seen["finite"]
                assert max(seen["steps"]) == 4


def test_ranks_that_run_out_of_data(on_two: Outcomes) -> None:
    """Under ``ddp.join()``, a rank without data still steps, because it takes part in the mean."""
    found = results(on_two, "uneven")
    for name in UNEVEN[:-1]:
        ranks = [rank[name] for rank in found]
        with case(name=name):
            assert [seen["differences"] for seen in ranks] == [[], []]
            for seen in ranks:
                assert set(seen["steps"].values()) == {4}  # the iterations of the last rank
            assert len({seen["digest"] for seen in ranks}) == 1


def test_unused_parameters_of_a_rank_that_ran_out_of_data(on_two: Outcomes) -> None:
    """torch treats the parameters that such a rank used last as used, and steps them by zeros."""
    ranks = [rank[UNEVEN[-1]] for rank in results(on_two, "uneven")]
    wanted = {"stem": 4, "both": 4, "odd": 2, "only_one": 4, "some": 1, "never": 0, "head": 4}
    for seen in ranks:
        assert {name: seen["steps"][f"{name}.weight"] for name in wanted} == wanted
    assert len({seen["digest"] for seen in ranks}) == 1


def test_two_optimizers(on_two: Outcomes) -> None:
    for job, hooks in (("subset", 1), ("small subset", 1), ("nested", 2)):
        ranks = results(on_two, job)
        with case(job=job):
            for seen in ranks:
                assert seen["differences"] == [[], [], [], []]
                assert len(seen["stepped"]) == hooks
                assert seen["stepped"][0]
            assert len({seen["digest"] for seen in ranks}) == 1


def test_a_hook_does_not_keep_its_module_alive(on_two: Outcomes) -> None:
    """DDP holds the hook from C++, where Python's collector cannot see a reference cycle."""
    for job in ("freed", "freed, unused"):
        assert results(on_two, job) == [[], []]


def test_one_rank_that_fails_ends_the_other(on_two: Outcomes) -> None:
    """The other rank fails when its collectives time out."""
    other, failing = results(on_two, "one fails")
    assert failing == {"type": "OSError", "text": "the disk is full"}
    assert other["type"] in ("RuntimeError", "DistBackendError")


def test_one_rank_that_fails_and_leaves_ends_the_other() -> None:
    """The other rank fails long before a time-out, because it finds no peer."""
    job = Job(scenarios.one_fails, {"rank_that_fails": 0, "leaves": True}, 1000)
    failing, other = run_ranks({"leaves": job}, ranks=2, seconds=120, fresh=True)["leaves"]
    assert failing.error is not None and "exit code 3" in failing.error
    assert other.result()["type"] in ("RuntimeError", "DistBackendError")


# -- more ranks ---------------------------------------------------------------------------------


def test_four_ranks(on_four: Outcomes) -> None:
    found = results(on_four, "cases")
    for name in ON_FOUR:
        for number, ranks in enumerate(zip(*(one[name] for one in found), strict=True)):
            with case(name=name, iteration=number):
                assert len({seen["digest"] for seen in ranks}) == 1
                assert len({seen["loss"] for seen in ranks}) == 4
                for seen in ranks:
                    assert seen["finite"]
                    assert seen["apart"] < 1e-12 if name == "clip" else seen["differences"] == []


def test_four_ranks_run_out_of_data(on_four: Outcomes) -> None:
    ranks = results(on_four, "uneven")
    assert [seen["differences"] for seen in ranks] == [[]] * 4
    assert len({seen["digest"] for seen in ranks}) == 1


def test_a_group_of_some_ranks(on_four: Outcomes) -> None:
    """Group ranks 0 and 1 are the ranks 1 and 3; the other ranks take no part."""
    outside, one, outside_too, three = results(on_four, "subgroup")
    assert outside == outside_too == {"group rank": None, "iterations": []}
    assert [one["group rank"], three["group rank"]] == [0, 1]
    assert len(one["iterations"]) == 4
    for first, second in zip(one["iterations"], three["iterations"], strict=True):
        assert first["differences"] == second["differences"] == []
        assert first["digest"] == second["digest"]
        assert first["loss"] != second["loss"]
