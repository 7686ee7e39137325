"""Tests of memory that ranks share: failures to share it, and leftovers."""

import signal
from pathlib import Path

from tests.choices import case
from tests.ranks import Job, run_ranks

from . import memory_jobs

REASONS = {"no room": "No space left on device"}


def test_where_one_rank_cannot_all_use_the_network() -> None:
    outcomes = run_ranks({"without": Job(memory_jobs.without)}, ranks=3, seconds=120)["without"]
    for rank, outcome in enumerate(outcomes):
        for how, seen in outcome.result().items():
            with case(how=how, rank=rank):
                assert seen["right"] and seen["operations"] == 0
                # Both kinds of operation warn here; a normal program shows the same warning once.
                assert len(seen["said"]) == (2 if how in REASONS and rank == 1 else 0)
                for said in seen["said"]:
                    assert f"{REASONS[how]}; ranks will exchange through the network" in said


def test_ranks_may_wait_in_any_order() -> None:
    outcomes = run_ranks({"order": Job(memory_jobs.waited_in_another_order)}, ranks=3, seconds=60)
    assert [outcome.result() for outcome in outcomes["order"]] == [True] * 3


def test_a_slot_is_filled_again_only_after_all_ranks_have_read_it() -> None:
    outcomes = run_ranks({"late": Job(memory_jobs.read_late)}, ranks=3, seconds=60)
    assert [outcome.result() for outcome in outcomes["late"]] == [True] * 3


def test_nothing_of_it_has_a_name() -> None:
    """Shared memory has no file names, so killed ranks leave nothing, and /dev/shm is not used."""
    for outcome in run_ranks({"names": Job(memory_jobs.names)}, ranks=3, seconds=120)["names"]:
        assert outcome.result() == [0, 0]


def test_what_a_killed_rank_leaves(tmp_path: Path) -> None:
    """A rank killed before other ranks know its memory leaves no file."""
    file = tmp_path / "mapped"
    job = Job(memory_jobs.killed_before_others_know, {"file": str(file)})
    (outcome,) = run_ranks({"killed": job}, ranks=1, seconds=120, fresh=True)["killed"]
    assert outcome.error is not None and f"exit code {-signal.SIGKILL}" in outcome.error
    (mapped,) = file.read_text().splitlines()
    assert not Path(mapped).exists()
    assert mapped.startswith("/memfd:")
