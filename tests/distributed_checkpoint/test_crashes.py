"""Tests of saves and loads in which a rank fails, is killed, or finds damage."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.ranks import Job, run_ranks

from . import crashes
from .runs import folder_of


def on_ranks(count: int, function: Callable[..., Any], **arguments: object) -> list[Any]:
    jobs = {"job": Job(function, arguments)}
    return list(run_ranks(jobs, ranks=count, seconds=90)["job"])


def test_a_rank_that_is_killed_leaves_the_last_checkpoint_whole(tmp_path: Path) -> None:
    """A new launch with fewer ranks loads the last complete checkpoint."""
    job = Job(crashes.killed_in_a_save, {"folder": str(tmp_path)})
    found = run_ranks({"killed": job}, ranks=3, seconds=120, fresh=True)["killed"]
    for rank, outcome in enumerate(found):
        assert (outcome.error is not None) == (rank == crashes.VICTIM), outcome.error
    for outcome in on_ranks(2, crashes.loads_the_first_save, folder=str(tmp_path)):
        outcome.result()


def test_a_rank_that_fails_is_named_by_all(tmp_path: Path) -> None:
    for outcome in on_ranks(3, crashes.a_rank_fails, folder=folder_of(tmp_path, "fails")):
        full, damaged = outcome.result()
        assert "No space left on device" in full and f"RANK {crashes.VICTIM}" in full
        assert "it was damaged: go on from another checkpoint" in damaged


def test_a_reader_for_other_ranks_is_refused(tmp_path: Path) -> None:
    jobs = {
        "other": Job(crashes.other_group_than_the_reader, {"folder": folder_of(tmp_path, "other")}),
        "subgroup": Job(crashes.on_subgroup, {"folder": folder_of(tmp_path, "subgroup")}),
    }
    found = run_ranks(jobs, ranks=4, seconds=90)
    for outcome in found["other"]:
        assert "made for 4 ranks, 1 load; give it the process_group" in outcome.result()
    for outcome in found["subgroup"]:
        outcome.result()


def test_in_the_background(tmp_path: Path) -> None:
    for outcome in on_ranks(2, crashes.in_the_background, folder=folder_of(tmp_path, "async")):
        outcome.result()
