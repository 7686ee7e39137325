"""Pool of ranks: results and errors come back, and a hang ends and differs from a death."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from sharding.testing import RankPool, rank_pool

from . import trouble


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(start="forkserver") as found:
        yield found


def test_values_come_back(pool: RankPool) -> None:
    found = [outcome.result() for outcome in pool.run(trouble.rank_and_sum, {"add": 10}, ranks=2)]
    assert found == [{"rank": rank, "ranks": 2, "sum": 21.0} for rank in range(2)]


def test_a_failure_comes_back_and_does_not_reach_the_next_call(pool: RankPool) -> None:
    before = [outcome.result() for outcome in pool.run(trouble.pid, ranks=2)]
    fine, failed = pool.run(trouble.fails_on, {"rank": 1}, ranks=2)
    assert fine.result() == "fine"
    assert failed.error == "LookupError: nothing here"
    with pytest.raises(AssertionError, match=r"(?s)LookupError: nothing here.*in fails_on"):
        failed.result()
    after = pool.run(trouble.rank_and_sum, {"add": 0}, ranks=3)
    assert [outcome.result()["sum"] for outcome in after] == [3.0, 3.0, 3.0]
    assert [outcome.result() for outcome in pool.run(trouble.pid, ranks=2)] == before


def test_what_cannot_be_sent_is_a_failure(pool: RankPool) -> None:
    (outcome,) = pool.run(trouble.a_function, ranks=1)
    assert outcome.error is not None and "cannot be sent" in outcome.error


def test_a_hang_says_which_rank_was_where_and_ends(pool: RankPool) -> None:
    pids = [outcome.result() for outcome in pool.run(trouble.pid, ranks=2)]
    told: list[tuple[int, str]] = []
    stuck = pool.run(
        trouble.waits_for_the_other,
        ranks=2,
        silent_seconds=2,
        group_seconds=600,
        tell=lambda rank, place: told.append((rank, place)),
    )
    assert sorted(told) == [(0, "the barrier"), (1, "the work")]
    for outcome in stuck:
        assert outcome.error is not None
        assert outcome.error.startswith("hang: no rank went on for 2 s\nrank 0 was at the barrier")
        assert "rank 1 was at the work" in outcome.error
        assert "in waits_for_the_other" in outcome.error  # the stacks of both
        assert "in sleeps_too_long" in outcome.error
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    again = [outcome.result() for outcome in pool.run(trouble.pid, ranks=2)]
    assert not set(again) & set(pids)


def test_a_rank_that_dies_is_no_hang(pool: RankPool) -> None:
    for outcome in pool.run(trouble.dies_on, {"rank": 1}, ranks=2, grace_seconds=1):
        assert outcome.error is not None
        assert outcome.error.startswith("a rank died: rank 1, exit code 7")


def test_after_a_death_those_that_wait_for_one_that_is_done_are_told(
    pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that is done ends too, as in training, which closes its connections."""
    monkeypatch.setattr(rank_pool, "LEAVE_SECONDS", 1.0)
    done, dead, told = pool.run(
        trouble.waits_for_one_that_leaves, ranks=3, group_seconds=600, grace_seconds=100
    )
    assert done.result() == "done"
    assert dead.error is not None and dead.error.startswith("a rank died: rank 1, exit code 0")
    assert told.result().startswith("told: ")
