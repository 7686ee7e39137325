"""Tests of both operations on several processes, with different data on every rank.

The operations use the network or shared memory. In shared memory, chunks go around a ring many
times.
"""

from typing import Any

import pytest

from tests.choices import case, pairs
from tests.ranks import Job, run_ranks

from . import jobs
from .buffers import CUTS, DTYPES

SUMS = pairs(dtype=DTYPES, cut=list(CUTS), average=[False, True])
EVERYWHERE: dict[str, dict[str, Any]] = {"sums": {"cases": SUMS}, "layouts": {}, "other_dtypes": {}}
NETWORK: dict[str, dict[str, Any]] = {"more_than_under_way": {}, "any_order": {}}
OF_TWO: dict[str, dict[str, Any]] = {"beside_ddp": {}}
OF_FOUR: dict[str, dict[str, Any]] = {"subgroup": {"ranks": [1, 3]}, "mesh": {}}

Runs = dict[tuple[str, int, bool], list[dict[str, Any]]]
"""Results of each rank, by job, number of ranks, and True if shared memory is used."""


@pytest.fixture(scope="module")
def runs() -> Runs:
    found: Runs = {}
    for ranks in (2, 3, 4):
        for memory in (False, True):
            wanted = {
                **EVERYWHERE,
                **({} if memory else NETWORK),
                **(OF_TWO if ranks == 2 else OF_FOUR if ranks == 4 else {}),
            }
            launches = {
                name: Job(
                    jobs.exchange, {"name": name, "arguments": arguments, "memory": memory}, 120
                )
                for name, arguments in wanted.items()
            }
            for name, outcomes in run_ranks(launches, ranks=ranks, seconds=120).items():
                found[name, ranks, memory] = [outcome.result() for outcome in outcomes]
    return found


def of(runs: Runs, wanted: str) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Return the runs of a job: its parameters, and the results of each rank."""
    return [
        ({"job": name, "ranks": ranks, "memory": memory}, seen)
        for (name, ranks, memory), seen in runs.items()
        if name == wanted
    ]


def test_sums_are_those_of_one_process(runs: Runs) -> None:
    for which, seen in of(runs, "sums"):
        with case(**which):
            for one in seen:
                assert one["found"] == {}
                assert one["operations"] == (2 * len(SUMS) if which["memory"] else 0)


def test_on_every_rank(runs: Runs) -> None:
    """Results do not depend on bucket sizes, on the order of waits, on dtypes, or on the mesh."""
    for name in ("layouts", "other_dtypes", "any_order", "beside_ddp", "mesh"):
        for which, seen in of(runs, name):
            with case(**which):
                assert [one["found"] for one in seen] == [True] * which["ranks"]
                assert all(bool(one["operations"]) == which["memory"] for one in seen)


def test_more_than_under_way(runs: Runs) -> None:
    for which, seen in of(runs, "more_than_under_way"):
        for one in seen:
            with case(**which):
                assert one["found"]["right"] and one["found"]["again"]
                assert one["found"]["scratch"] <= 2  # in_flight is 2, for nine operations


def test_group_ranks_are_not_global_ranks(runs: Runs) -> None:
    right = {"own": True, "gathered": True, "twin": [True] * 4, "sum": 1.0}
    for which, seen in of(runs, "subgroup"):
        with case(**which):
            found = [one["found"] for one in seen]
            first = {**right, "rank": 0, "part": [[1], 0, 1]}
            second = {**right, "rank": 1, "part": [[3], 0, 3]}
            assert found == [None, first, None, second]
            operations = 2 if which["memory"] else 0
            assert [one["operations"] for one in seen] == [0, operations, 0, operations]


def test_groups_dropped_at_once() -> None:
    """A rank that drops a group closes no connection that another rank is still opening."""
    [outcomes] = run_ranks({"dropped": Job(jobs.dropped_groups, {})}, ranks=4, seconds=120).values()
    assert [outcome.result() for outcome in outcomes] == [30] * 4


def test_groups_of_one_rank() -> None:
    both = {
        name: Job(jobs.groups_of_one, {"by_torch": name == "made"}) for name in ("split", "made")
    }
    jobs_of_all = {**both, "different": Job(jobs.different_counts)}
    outcomes = run_ranks(jobs_of_all, ranks=4, seconds=120)
    refusals = [outcome.result() for outcome in outcomes["different"]]
    assert refusals[::2] == [None, None]
    for refusal in refusals[1::2]:
        assert "ranks [1, 3] know different numbers of process groups" in refusal
    for name in both:
        assert [outcome.result() for outcome in outcomes[name]] == [[True, True]] * 4
