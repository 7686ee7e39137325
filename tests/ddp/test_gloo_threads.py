"""How gloo's threads are awaited: by what the kernel shows of them, here drawn by hand."""

from pathlib import Path

import pytest

from hooks import gloo_threads
from hooks.gloo_threads import NAME, await_rest

STATUS = "Name:\t{name}\nState:\t{state}\nvoluntary_ctxt_switches:\t{slept}\n"


@pytest.fixture
def waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that were waited; nobody waits for them."""
    waited: list[float] = []
    monkeypatch.setattr(gloo_threads, "_TASKS", tmp_path)
    monkeypatch.setattr(gloo_threads.time, "sleep", waited.append)
    monkeypatch.setattr(gloo_threads.time, "monotonic", lambda: sum(waited))
    return waited


def show(folder: Path, thread: str, state: str, slept: int, name: str = NAME) -> None:
    (folder / thread).mkdir(exist_ok=True)
    (folder / thread / "status").write_text(STATUS.format(name=name, state=state, slept=slept))


def test_others_are_not_awaited(tmp_path: Path, waits: list[float]) -> None:
    show(tmp_path, "1", "R (running)", 0, name="python")
    await_rest(10.0)
    assert waits == []


def test_a_thread_that_goes_on_sleeping_is_done(tmp_path: Path, waits: list[float]) -> None:
    show(tmp_path, "1", "S (sleeping)", 7)
    await_rest(10.0)
    assert waits == [gloo_threads.APART]


@pytest.mark.parametrize("state", ["R (running)", "S (sleeping)"])
def test_one_that_runs_or_wakes_up_again_is_awaited(
    state: str, tmp_path: Path, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    show(tmp_path, "1", state, 0)

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        awake = len(waits) < 5
        show(tmp_path, "1", state if awake else "S (sleeping)", len(waits) if awake else 5)

    monkeypatch.setattr(gloo_threads.time, "sleep", sleep)
    await_rest(10.0)
    assert len(waits) == 6  # seen asleep after the fifth wait, and still so after the sixth


def test_it_takes_no_longer_than_asked(tmp_path: Path, waits: list[float]) -> None:
    show(tmp_path, "1", "R (running)", 0)
    await_rest(0.1)
    assert 0.1 <= sum(waits) < 0.1 + gloo_threads.APART


def test_one_that_ends_is_done(
    tmp_path: Path, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    show(tmp_path, "1", "R (running)", 0)

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        (tmp_path / "1" / "status").unlink(missing_ok=True)

    monkeypatch.setattr(gloo_threads.time, "sleep", sleep)
    await_rest(10.0)
    assert len(waits) == 1


def test_where_the_kernel_shows_nothing_they_are_given_time(
    tmp_path: Path, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gloo_threads, "_TASKS", tmp_path / "none")
    await_rest(10.0)
    await_rest(0.05)
    assert waits == [gloo_threads.UNSEEN, 0.05]
