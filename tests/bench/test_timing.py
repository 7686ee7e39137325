"""Turns of contestants, timed by a fake clock."""

import gc

import pytest

from benchmarks import timing


class Clock:
    """Clock that advances only while a worker runs."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def worker(self, name: str, seconds: float):
        def step() -> None:
            self.now += seconds
            self.log.append(name)

        return step


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: made.now)
    return made


def nothing(*_: object) -> None:
    return None


def test_a_turn_is_filled_with_steps(clock: Clock) -> None:
    assert timing.steps_in_a_turn(clock.worker("short", 0.001), nothing, 0.0495) == 50
    assert timing.steps_in_a_turn(clock.worker("long", 3.0), nothing, 0.05) == 1


def test_every_round_has_all_and_begins_with_another(clock: Clock) -> None:
    steps = {"a": clock.worker("a", 1.0), "b": clock.worker("b", 2.0), "c": clock.worker("c", 4.0)}
    told: list[int] = []
    found = timing.take_turns(steps, rounds=4, turn_seconds=0.5, wait=nothing, tell=told.append)
    assert found == {"a": [1.0] * 4, "b": [2.0] * 4, "c": [4.0] * 4}
    assert told == [1, 2, 3, 4]
    # Each worker is timed once before the first round. In the first round, each has one extra step.
    assert "".join(clock.log) == "abc" + "aabbcc" + "bca" + "cab" + "abc"


def test_the_device_is_waited_for(clock: Clock) -> None:
    pending: list[float] = []

    def launch() -> None:
        pending.append(0.5)

    def wait() -> None:
        clock.now += sum(pending)
        pending.clear()

    assert timing.seconds_per_step(launch, wait, 4) == 0.5


def test_no_garbage_is_collected_while_something_is_timed() -> None:
    def disturbed() -> None:
        with timing.quiet():
            assert not gc.isenabled()
            raise RuntimeError("out")

    with pytest.raises(RuntimeError, match="out"):
        disturbed()
    assert gc.isenabled()
