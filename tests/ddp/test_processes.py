"""The harness: what ranks return and raise comes back; a hang ends, and is told from a failure."""

from pathlib import Path

import pytest

from . import trouble
from .conftest import Launched
from .processes import Job, Outcomes, run_ranks


@pytest.fixture(scope="module")
def with_hang(launched: Launched) -> Outcomes:
    jobs = {
        "sum": Job(trouble.rank_and_sum, {"add": 10}),
        "fails": Job(trouble.fails_on, {"rank": 1}),
        "after": Job(trouble.rank_and_sum, {"add": 0}),
        "pid": Job(trouble.pid),
        "stuck": Job(trouble.waits_for_the_other),
        "never reached": Job(trouble.pid),
    }
    return launched("with_hang", lambda: run_ranks(jobs, ranks=2, seconds=5))


def test_values_come_back(with_hang: Outcomes) -> None:
    found = [outcome.result() for outcome in with_hang["sum"]]
    assert found == [{"rank": rank, "ranks": 2, "sum": 21.0} for rank in range(2)]


def test_exceptions_come_back(with_hang: Outcomes) -> None:
    fine, failed = with_hang["fails"]
    assert fine.result() == "fine"
    assert failed.error == "LookupError: nothing here"
    with pytest.raises(AssertionError, match=r"(?s)LookupError: nothing here.*in fails_on"):
        failed.result()


def test_a_failure_does_not_reach_the_next_job(with_hang: Outcomes) -> None:
    assert [outcome.result()["sum"] for outcome in with_hang["after"]] == [1.0, 1.0]


def test_a_hang_says_which_rank_was_where(with_hang: Outcomes) -> None:
    for job in ("stuck", "never reached"):
        for outcome in with_hang[job]:
            assert outcome.error is not None
            assert outcome.error.startswith("hang: no rank went on for 5 s\nrank 0 was in 'stuck'")
            assert "rank 1 was in 'stuck'" in outcome.error
            assert "in waits_for_the_other" in outcome.error  # the stacks of both
            assert "in sleeps_too_long" in outcome.error


def test_no_process_survives_a_hang(with_hang: Outcomes) -> None:
    for outcome in with_hang["pid"]:
        command = Path(f"/proc/{outcome.result()}/cmdline")
        assert not command.exists() or b"rank.py" not in command.read_bytes()


def test_a_rank_that_dies_is_no_hang() -> None:
    outcomes = run_ranks({"dies": Job(trouble.dies_on, {"rank": 1})}, ranks=2, seconds=60)
    for outcome in outcomes["dies"]:
        assert outcome.error is not None and outcome.error.startswith("a rank died")
