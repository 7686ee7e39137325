"""A rank that dies or never comes: an error that names it, within the timeout."""

import pytest

from tests.ranks import Job, Outcomes, run_ranks

from . import jobs


def launch() -> Outcomes:
    found: Outcomes = run_ranks(
        {
            operation: Job(jobs.absent, {"never": 2, "operation": operation})
            for operation in ("reduce_scatter", "all_gather")
        },
        ranks=3,
        seconds=60,
    )
    for operation in ("reduce_scatter", "all_gather"):
        # A launch of its own: the process that dies takes the others' next jobs with it.
        job = Job(jobs.killed, {"victim": 1, "operation": operation})
        found |= run_ranks({f"killed in {operation}": job}, ranks=4, seconds=60, fresh=True)
    return found


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return launch()


@pytest.mark.parametrize("operation", ["reduce_scatter", "all_gather"])
def test_a_rank_that_never_comes_is_named(outcomes: Outcomes, operation: str) -> None:
    for rank, outcome in enumerate(outcomes[operation][:2]):
        seen = outcome.result()
        assert seen["error"].startswith(
            f"{operation} 0: group rank {rank} (global rank {rank}) of 3 ranks waited "
        )
        elements = 33 if operation == "reduce_scatter" else 34  # its own range, or that of rank 2
        assert f"group rank 2 (global rank 2) to send {elements} elements" in seen["error"]
        if operation == "reduce_scatter":  # a broadcast may have had to pass through rank 2
            assert f"group rank {1 - rank}" not in seen["error"].split("ranks waited")[1]
        assert "timeout of 0:00:03" in seen["error"]
        assert seen["cause"] == "RuntimeError"
        assert seen["kept"]
        assert 2.0 < seen["seconds"] < 20.0


@pytest.mark.parametrize("operation", ["reduce_scatter", "all_gather"])
def test_a_rank_that_dies_is_named(outcomes: Outcomes, operation: str) -> None:
    for rank in (0, 2, 3):
        seen = outcomes[f"killed in {operation}"][rank].result()
        assert f"group rank {rank} (global rank {rank}) of 4 ranks lost " in seen["error"]
        # Beside it, perhaps, one that gloo cut off from this rank when it lost rank 1 itself.
        lost = seen["error"].split(" ranks lost ")[1].split(" while")[0]
        assert "group rank 1 (global rank 1)" in lost
        assert "go on from the last checkpoint" in seen["error"]
        assert seen["cause"] in ("RuntimeError", "DistBackendError")
        assert seen["seconds"] < 20.0  # not the 30 s of the group's timeout
        assert "future" not in seen or seen["error"] in seen["future"]
    assert outcomes[f"killed in {operation}"][1].error is not None
