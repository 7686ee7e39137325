"""A rank fails or dies in something that all ranks do: the others end, and say which one, and why.

No time is measured: a rank that waited for the group's timeout would be taken for a hang, and have
no result.
"""

import re
from pathlib import Path

import pytest

from tests.ranks import Job, Outcomes, run_ranks

from . import jobs_failing

TOLD = {
    "full disk": "OSError: [Errno 28] No space left on device",
    "CheckpointException": "CheckpointException: CheckpointException ranks",
    "KeyboardInterrupt": "KeyboardInterrupt: ",
    "SystemExit": "SystemExit: enough",
}
DEATHS = ("step", "save", "load", "collect", "sending")


def launch(base: Path) -> Outcomes:
    jobs = {
        f"fails {what}": Job(
            jobs_failing.fails, {"folder": str(base), "what": what}, jobs_failing.FAR
        )
        for what in TOLD
    }
    jobs["begins"] = Job(jobs_failing.begins, {"folder": str(base)}, jobs_failing.FAR)
    jobs["plans"] = Job(jobs_failing.plans, {}, jobs_failing.FAR)
    jobs["collects"] = Job(jobs_failing.collects, {}, jobs_failing.FAR)
    found: Outcomes = run_ranks(jobs, ranks=3, seconds=60)
    for what in DEATHS:
        # A launch of its own: the process that dies takes the others' next jobs with it.
        folder = base / what
        folder.mkdir(exist_ok=True)
        arguments = {"folder": str(folder), "what": what}
        job = Job(jobs_failing.dies_in, arguments, jobs_failing.FAR)
        found |= run_ranks({what: job}, ranks=3, seconds=60, fresh=True)
    return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return launch(tmp_path_factory.mktemp("failing"))


@pytest.mark.parametrize("what", TOLD)
def test_a_rank_that_fails_is_named_with_its_error(outcomes: Outcomes, what: str) -> None:
    """Whatever it raises, and raises it itself: an interrupt stays one (fault 12)."""
    for rank, outcome in enumerate(outcomes[f"fails {what}"]):
        seen = outcome.result()
        for action, told in (
            ("save", "write its part of the checkpoint"),
            ("load", "load the checkpoint"),
        ):
            if rank == 1:
                assert seen[action].startswith(TOLD[what])
            else:
                assert seen[action].startswith(
                    f"RuntimeError: group rank 1 (global rank 1) could not {told}: {TOLD[what]}"
                )
        assert seen["kept"] and seen["unchanged"]
        # After all of it, the files of the last checkpoint, and no others.
        assert seen["files"] == 7


@pytest.mark.parametrize("what", TOLD)
def test_several_ranks_that_fail_are_named(outcomes: Outcomes, what: str) -> None:
    """The first one with its error (fault 12)."""
    own, other, same = (outcome.result()["several"] for outcome in outcomes[f"fails {what}"])
    assert own == same and own.startswith(TOLD[what])
    assert other.startswith("RuntimeError: group rank 0 (global rank 0) could not load the ")
    assert other.endswith("(group rank 2 (global rank 2) failed as well)")


def test_a_first_rank_that_cannot_begin_is_named(outcomes: Outcomes) -> None:
    """Before any rank has written anything (faults 12 and 16)."""
    first, *others = (outcome.result() for outcome in outcomes["begins"])
    assert first[0].startswith(("FileExistsError", "NotADirectoryError"))
    assert "Nothing was changed" in first[1]
    for seen in others:
        assert seen[0].startswith("RuntimeError: group rank 0 (global rank 0) could not begin")
        assert "Nothing was changed" in seen[1]


def test_an_interrupt_while_a_plan_is_made(outcomes: Outcomes) -> None:
    """It stays one, and the others are told (fault 12)."""
    first, own, last = (outcome.result() for outcome in outcomes["plans"])
    assert own == "KeyboardInterrupt: "
    assert first == last
    assert first.startswith("ValueError: group rank 1 (global rank 1) could not make a plan: Keyb")


def test_state_that_cannot_travel_is_an_error_on_all_ranks(outcomes: Outcomes) -> None:
    """Before any of it does; so is another target on another rank (fault 12)."""
    for rank, outcome in enumerate(outcomes["collects"]):
        seen = outcome.result()
        assert seen["to"].startswith("ValueError: to must be the same on all ranks, got [0, 1, 0]")
        if rank == 1:
            assert seen["object"].startswith("TypeError: state that is consolidated must be of ")
        else:
            assert "group rank 1 (global rank 1) could not prepare its state" in seen["object"]


@pytest.mark.parametrize("what", DEATHS[1:])
def test_a_rank_that_dies_is_named(outcomes: Outcomes, what: str) -> None:
    """By all others, and none that lives is (fault 15)."""
    for rank in (0, 2):
        error = outcomes[what][rank].result()["error"]
        assert error.startswith("TransportError: ")
        if what == "sending" and rank == 2:  # it was told by the first
            error = error.removeprefix("TransportError: ")
            assert error.startswith("TransportError: ")
        assert "lost group rank 1 (global rank 1) while" in error
    assert outcomes[what][1].error is not None


def test_a_rank_that_dies_in_training_is_named(outcomes: Outcomes) -> None:
    """Perhaps with one that has ended because of it."""
    for rank in (0, 2):
        error = outcomes["step"][rank].result()["error"]
        assert error.startswith("TransportError: ")
        lost = re.search("lost (.*) while", error)
        assert lost is not None and "group rank 1 (global rank 1)" in lost[1]
        assert f"group rank {rank} " not in lost[1]
    assert outcomes["step"][1].error is not None
