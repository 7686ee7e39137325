"""Tests of ``exchange``: processes get the elements that a new plan gives them, bit for bit."""

from typing import Any

import pytest

from tests.choices import case
from tests.ranks import Job, Outcomes, run_ranks

from . import reshard_jobs

PLANS: dict[str, tuple[dict[str, Any], dict[str, Any], list[int]]] = {
    "fewer ranks": (
        {"world_size": 4, "policy": "elements"},
        {"world_size": 2, "policy": "greedy"},
        [],
    ),
    "more ranks": ({"world_size": 1}, {"world_size": 4, "policy": "elements"}, []),
    "replicas": (
        {"world_size": 3, "policy": "elements"},
        {"world_size": 4, "policy": "hierarchical", "node_size": 2},
        [],
    ),
    "the same plan": (
        {"world_size": 4, "policy": "elements"},
        {"world_size": 4, "policy": "elements"},
        [],
    ),
    "a subgroup": (
        {"world_size": 2, "policy": "elements"},
        {"world_size": 2, "policy": "greedy"},
        [1, 3],
    ),
}
FAULTS = {
    "missing": "ValueError: before has no",
    "short": "ValueError: before['",
    "dtype": "sends other ranges or dtypes than",
    "no tensor": "TypeError: before['",
    "another plan": "sends other ranges or dtypes than",
}


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    jobs = {
        name: Job(reshard_jobs.moved, {"old": old, "new": new, "ranks": ranks})
        for name, (old, new, ranks) in PLANS.items()
    }
    jobs |= {name: Job(reshard_jobs.refused, {"fault": name, "on": 2}) for name in FAULTS}
    return run_ranks(jobs, ranks=4, seconds=120)


def test_each_rank_gets_the_elements_of_the_new_plan(outcomes: Outcomes) -> None:
    """The other ranks of the world take part, with nothing to send or to get."""
    for name in PLANS:
        for rank, one in enumerate(outcomes[name]):
            with case(name=name, rank=rank):
                assert one.result() == []


def test_a_fault_of_one_rank_is_raised_on_all_and_changes_nothing(outcomes: Outcomes) -> None:
    for name, text in FAULTS.items():
        for rank, one in enumerate(outcomes[name]):
            said, is_unchanged = one.result()
            with case(name=name, rank=rank, said=said):
                assert text.partition(": ")[2] in said
                assert is_unchanged
                if text.startswith(("ValueError", "TypeError")):
                    own = "RuntimeError: group rank 2 (global rank 2) could not exchange ranges"
                    assert said.startswith(text if rank == 2 else own)
