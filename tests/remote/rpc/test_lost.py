"""DistributedOptimizer over torch's RPC when a trainer or a worker is lost or slow."""

from typing import Any

import pytest

from sharding.testing import Outcome
from tests.ranks import Job, run_ranks

from . import lost_jobs


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    """Return the outcomes of two trainers and two workers."""
    meeting = tmp_path_factory.mktemp("lost") / "meeting"
    job = Job(lost_jobs.lose, {"meeting": str(meeting)})
    return run_ranks({"lost": job}, ranks=4, seconds=300, fresh=True)["lost"]


@pytest.fixture(scope="module")
def found(outcomes: list[Outcome]) -> dict[str, Any]:
    assert outcomes[1].result() == {}
    return dict(outcomes[0].result())


def test_a_trainer_that_is_gone_after_its_backward_pass_disturbs_nobody(
    found: dict[str, Any], outcomes: list[Outcome]
) -> None:
    assert "rank 3" in str(outcomes[3].error)
    assert found["vanished"] != "nothing"
    assert found["undisturbed"] == [True] * 8


def test_a_worker_that_is_slow_is_named(found: dict[str, Any]) -> None:
    """The error comes after the time-out; the other worker completes the step."""
    text = "WorkerError: step failed on 1 of 2 workers:\n  ps2: ConnectionError: no answer from"
    assert found["slow"].startswith(text)
    assert found["others"] == [True] * 4


def test_a_run_goes_on_elsewhere_when_a_worker_is_killed_in_a_step(
    found: dict[str, Any], outcomes: list[Outcome]
) -> None:
    """The run resumes from the saved state, bit for bit; the other worker still saves its own.

    The error comes long before the time limit of calls.
    """
    assert "rank 2" in str(outcomes[2].error)
    assert "step failed on 1 of 2 workers:\n  ps2: ConnectionError: no answer" in found["killed"]
    assert "state_dict failed on 1 of 2 workers:\n  ps2: " in found["unsaved"]
    assert found["left"] == [True] * 4
    assert found["steps"] == dict.fromkeys("0123", 4)
    assert found["resumed"] == [True] * 8


def test_a_start_without_an_end_is_named(found: dict[str, Any]) -> None:
    """The error comes after the limit of starts, long before the limit of calls."""
    told = found["endless start"]
    assert told.startswith("ConnectionError: no answer from 'ps1', which may be gone: within 0.1 s")
    assert "has not made what is placed on it" in told
    assert "give a start_timeout above 0.1" in told


def test_a_start_may_take_longer_than_a_call(found: dict[str, Any]) -> None:
    """A start succeeds although it takes longer than a call can last, half a second."""
    assert found["slow start"] == {"total": [1.0, 1.0]}
