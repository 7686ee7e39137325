"""Tests that all ranks get an error that names a rank that dies, never comes, or stops."""

import json
from pathlib import Path

import pytest

from tests.choices import case
from tests.ranks import Job, Outcomes, run_at_once, run_ranks

from . import trouble

PATIENT = 300.0
"""Timeout of the group of all ranks in seconds, longer than the timeouts under test."""


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    of_three = {
        "absent": Job(trouble.absent, {"never": 2}, PATIENT),
        "absent in memory": Job(trouble.absent_in_memory, {"never": 1}, PATIENT),
        "never came": Job(trouble.never_came, {"never": 1}, PATIENT),
    }
    deaths = {
        "ends early": Job(trouble.ends_early, {"last": 0}, PATIENT),
        "known": Job(trouble.known, {}, PATIENT),
    }
    return {
        **run_at_once(of_three, ranks=3, seconds=120),
        **run_ranks({"out of step": Job(trouble.out_of_step)}, ranks=2, seconds=120),
        **run_ranks(deaths, ranks=3, seconds=120, fresh=True),
    }


def test_a_rank_that_never_comes_is_named(outcomes: Outcomes) -> None:
    for rank, outcome in enumerate(outcomes["absent"][:2]):
        # reduce_scatter waits for this rank's range, and all_gather for that of rank 2
        for operation, elements in (("reduce_scatter", 1333 + rank), ("all_gather", 1334)):
            seen = outcome.result()[operation]
            with case(operation=operation, rank=rank):
                assert seen["error"].startswith(
                    f"{operation} 0: group rank {rank} (global rank {rank}) of 3 ranks waited "
                )
                waits = seen["error"].split("ranks waited")[1]
                assert f"group rank 2 (global rank 2) to send {elements} elements" in waits
                if operation == "reduce_scatter":  # a broadcast may have to pass through rank 2
                    assert f"group rank {1 - rank}" not in waits
                assert "timeout of 0:00:03" in waits
                assert seen["cause"] == "RuntimeError"
                assert seen["kept"]


def test_a_rank_that_dies_is_named(tmp_path: Path) -> None:
    job = Job(trouble.killed, {"victim": 1, "folder": str(tmp_path)}, PATIENT)
    run_ranks({"killed": job}, ranks=4, seconds=120, fresh=True)
    for rank in (0, 2, 3):
        for operation, seen in json.loads((tmp_path / str(rank)).read_text()).items():
            with case(operation=operation, rank=rank):
                assert f"group rank {rank} (global rank {rank}) of 4 ranks lost " in seen["error"]
                # The error may also name a rank that gloo disconnected when that rank lost rank 1.
                lost = seen["error"].split(" ranks lost ")[1].split(" while")[0]
                assert "group rank 1 (global rank 1)" in lost
                assert "go on from the last checkpoint" in seen["error"]
                assert seen["cause"] in ("RuntimeError", "DistBackendError")
                assert all(seen["error"] in text for text in seen["texts"])


def test_who_knows_of_a_death_sends_the_others_what_is_theirs(outcomes: Outcomes) -> None:
    """A rank that gave up at the first message left other ranks waiting until it ended."""
    for rank in (0, 1):
        error = outcomes["known"][rank].result()["error"]
        assert f"group rank {rank} (global rank {rank}) of 3 ranks lost group rank 2 " in error


# --------------------------------------------------------------------------------- through memory


def test_a_rank_that_dies_is_named_in_operations_through_memory(tmp_path: Path) -> None:
    job = Job(trouble.died_in_memory, {"victim": 1, "folder": str(tmp_path)}, PATIENT)
    run_ranks({"died": job}, ranks=3, seconds=120, fresh=True)
    for rank in (0, 2):
        for operation, error in json.loads((tmp_path / str(rank)).read_text()).items():
            with case(operation=operation, rank=rank):
                begin, end = error.split(" ranks lost ")
                assert begin == f"{operation} 1: group rank {rank} (global rank {rank}) of 3"
                assert "group rank 1 (global rank 1)" in end.split(" while")[0]
                assert "it died" in end and "go on from the last checkpoint" in end


def test_a_rank_that_does_not_go_on_is_named(outcomes: Outcomes) -> None:
    for rank in (0, 2):
        for operation, error in outcomes["absent in memory"][rank].result().items():
            with case(operation=operation, rank=rank):
                begin, end = error.split(" ranks waited ")
                assert begin == f"{operation} 1: group rank {rank} (global rank {rank}) of 3"
                assert "group rank 1 (global rank 1) to send" in end
                assert "timeout of 0:00:03" in end


def test_a_rank_that_never_comes_to_share_memory_is_named(outcomes: Outcomes) -> None:
    for rank, outcome in enumerate(outcomes["never came"]):
        seen = outcome.result()
        assert seen == {} if rank == 1 else "group rank 1 (global rank 1) to send" in seen["error"]


def test_a_rank_may_end_when_it_has_done_its_part(outcomes: Outcomes) -> None:
    """The other ranks read its memory afterwards."""
    assert [outcomes["ends early"][rank].result() for rank in (1, 2)] == [[True] * 3] * 2


def test_ranks_that_are_out_of_step(outcomes: Outcomes) -> None:
    said = [outcome.result() for outcome in outcomes["out of step"]]
    assert "group rank 1 sends 236 bytes as its piece 0, where 240 bytes" in said[0][0]
    assert "group rank 0 sends 160 bytes as its piece 0, where 164 bytes" in said[1][0]
    for first, second in said:  # the memory may have any contents then
        assert second == first
