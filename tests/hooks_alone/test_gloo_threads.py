"""How gloo's threads are awaited: by what the kernel shows of them, here drawn by hand."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hooks import gloo_threads
from hooks.gloo_threads import NAME, await_rest
from tests.choices import case

STATUS = "Name:\t{name}\nState:\t{state}\nvoluntary_ctxt_switches:\t{slept}\n"
RUNS, SLEEPS = "R (running)", "S (sleeping)"


class Kernel:
    """What it shows of one thread; its clock goes on when somebody waits.

    For the thread of the test: others may be waiting to free groups of tests before it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.thread = threading.get_ident()
        self.waits: list[float] = []
        self.others_wait = threading.Event()
        self.at_each_wait: Callable[[int], None] = lambda number: None

    def show(self, state: str, slept: int, name: str = NAME, thread: int = 1) -> None:
        (self.folder / str(thread)).mkdir(exist_ok=True)
        (self.folder / str(thread) / "status").write_text(
            STATUS.format(name=name, state=state, slept=slept)
        )

    def sleep(self, seconds: float) -> None:
        if threading.get_ident() != self.thread:
            self.others_wait.set()
            time.sleep(seconds)
            return
        self.waits.append(seconds)
        self.at_each_wait(len(self.waits))

    def monotonic(self) -> float:
        return sum(self.waits) if threading.get_ident() == self.thread else time.monotonic()


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    found = Kernel(tmp_path)
    monkeypatch.setattr(gloo_threads, "_TASKS", tmp_path)
    monkeypatch.setattr(gloo_threads, "time", found)
    return found


def test_others_are_not_awaited(kernel: Kernel) -> None:
    kernel.show(RUNS, 0, name="python")
    await_rest(10.0)
    assert kernel.waits == []


def test_a_thread_that_goes_on_sleeping_is_done(kernel: Kernel) -> None:
    kernel.show(SLEEPS, 7)
    await_rest(10.0)
    assert kernel.waits == [gloo_threads.APART]


def test_threads_that_free_groups_of_other_tests_count_for_themselves(kernel: Kernel) -> None:
    kernel.show(RUNS, 7)
    beside = threading.Thread(target=await_rest, args=(0.1,))
    beside.start()
    beside.join(120)
    assert not beside.is_alive() and kernel.waits == []


def test_those_that_look_are_none_of_them(kernel: Kernel) -> None:
    """They have the name of the thread that started them, and one waited for the other."""
    kernel.show(RUNS, 7)
    beside = threading.Thread(target=await_rest, args=(120.0,))
    beside.start()
    assert kernel.others_wait.wait(120) and beside.native_id is not None
    kernel.show(RUNS, 0, thread=beside.native_id)
    kernel.show(RUNS, 0, thread=threading.get_native_id())
    kernel.at_each_wait = lambda _: (kernel.folder / "1" / "status").unlink()
    await_rest(10.0)
    assert kernel.waits == [gloo_threads.APART]
    beside.join(120)
    assert not beside.is_alive()


def test_one_that_runs_or_wakes_up_again_is_awaited(kernel: Kernel) -> None:
    for state in (RUNS, SLEEPS):
        kernel.waits.clear()
        kernel.show(state, 0)
        kernel.at_each_wait = lambda number, state=state: kernel.show(
            state if number < 5 else SLEEPS, min(number, 5)
        )
        await_rest(10.0)
        with case(state=state):  # seen asleep after the fifth wait, and still so after the sixth
            assert len(kernel.waits) == 6


def test_it_takes_no_longer_than_asked(kernel: Kernel) -> None:
    kernel.show(RUNS, 0)
    await_rest(0.1)
    assert 0.1 <= sum(kernel.waits) < 0.1 + gloo_threads.APART


def test_one_that_ends_is_done(kernel: Kernel) -> None:
    kernel.show(RUNS, 0)
    kernel.at_each_wait = lambda _: (kernel.folder / "1" / "status").unlink()
    await_rest(10.0)
    assert len(kernel.waits) == 1


def test_where_the_kernel_shows_nothing_they_are_given_time(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gloo_threads, "_TASKS", kernel.folder / "none")
    await_rest(10.0)
    await_rest(0.05)
    assert kernel.waits == [gloo_threads.UNSEEN, 0.05]
