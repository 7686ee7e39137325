"""Limit on the age of gradients: old gradients are refused, or readers wait."""

import threading
from functools import partial
from typing import Any

import pytest

from functional_optim import DistributedOptimizer, sgd
from functional_optim.remote import StaleError, WorkerError
from tests.choices import case

from .support import SHAPES, assert_same, gradients, locally, parameters, placement, run

over_threads = DistributedOptimizer.over_threads


def test_a_step_that_is_too_old_is_refused_on_all_workers() -> None:
    params = parameters()
    optimizer = over_threads(sgd, params, placement(2), lr=0.1)
    optimizer.limit_staleness(1)
    snapshots = [optimizer.snapshot() for _ in range(4)]
    alone = gradients(0, [name for name in SHAPES if name != "hidden.weight"])  # on ps1
    made = [alone, alone, gradients(2)]
    optimizer.step(made[0], snapshots[0])
    optimizer.step(made[1], snapshots[1])
    before = {name: param.detach().clone() for name, param in params.items()}
    text = "step failed on 1 of 2 workers:\n  ps1: StaleError: these gradients are 2 steps old"
    with pytest.raises(StaleError, match=text) as caught:
        optimizer.step(gradients(1), snapshots[2])
    assert isinstance(caught.value, WorkerError)
    assert_same(params, before)
    optimizer.step(made[2], optimizer.snapshot())
    found = optimizer.counters()
    assert {worker: (one.steps, one.refused) for worker, one in found.items()} == {
        "ps0": (3, 0),
        "ps1": (3, 1),
    }
    assert found["ps1"].staleness == {0: 2, 1: 1}
    assert found["ps0"].max_staleness == 0
    optimizer.limit_staleness(0)
    with pytest.raises(StaleError, match="failed on 2 of 2"):
        optimizer.step(gradients(1), snapshots[3])
    optimizer.limit_staleness(None)
    optimizer.step(gradients(3), snapshots[3])  # no bound
    optimizer.close()
    assert_same(params, locally(sgd(lr=0.1), [*made, gradients(3)]))


def waiting(optimizer: DistributedOptimizer, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return an event that is set when a reader waits, before others can change the limit."""
    found, changed = threading.Event(), optimizer._limit._changed
    original = changed.wait_for

    def wait_for(*args: Any) -> Any:
        found.set()
        return original(*args)

    monkeypatch.setattr(changed, "wait_for", wait_for)
    return found


def test_a_reader_waits_for_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait ends with a step, a closed snapshot, a dead trainer, or the end of the limit."""

    def step(optimizer: DistributedOptimizer, slow: list[Any]) -> None:
        optimizer.step(gradients(0), slow.pop())

    def close(_: DistributedOptimizer, slow: list[Any]) -> None:
        slow.pop().close()

    def die(_: DistributedOptimizer, slow: list[Any]) -> None:
        slow.clear()

    def free(optimizer: DistributedOptimizer, _: list[Any]) -> None:
        optimizer.limit_staleness(None)

    for way, steps in ((step, 2), (close, 1), (die, 1), (free, 1)):
        with case(way=way):
            optimizer = over_threads(sgd, parameters(), placement(2), lr=0.1)
            optimizer.limit_staleness(1, "wait")
            slow, fast = [optimizer.snapshot()], optimizer.snapshot()
            read: list[Any] = []
            seen = waiting(optimizer, monkeypatch)
            thread = threading.Thread(target=lambda: read.append(optimizer.snapshot()))  # noqa: B023  it ends here
            optimizer.step(gradients(0), fast)
            thread.start()
            assert seen.wait(60)
            assert not read
            way(optimizer, slow)
            thread.join(60)
            assert set(read[0].numbers["ps0"]) == {steps}
            counted = optimizer.counters()["ps0"]
            assert (counted.read_waits, counted.refused) == (1, 0)
            optimizer.close()


def steps(optimizer: DistributedOptimizer, *, reads: bool) -> None:
    for step in range(15):
        snapshot = optimizer.snapshot() if reads else None  # a trainer that reads elsewhere
        optimizer.step(gradients(step), snapshot)


def test_where_readers_wait_no_gradient_is_too_old() -> None:
    """With waiting readers, no gradient is too old and all steps are made, in any thread order."""
    for most in (0, 1, 3, 5):
        with case(most=most):
            optimizer = over_threads(sgd, parameters(), placement(2), lr=0.1)
            optimizer.limit_staleness(most, "wait")
            run([partial(steps, optimizer, reads=me > 0) for me in range(4)])
            for one in optimizer.counters().values():
                assert (one.steps, one.refused) == (60, 0)
                assert one.max_staleness <= most
                assert sum(one.staleness.values()) == 45
            optimizer.close()


def test_a_limit_that_is_none_is_refused() -> None:
    optimizer = over_threads(sgd, parameters(), placement(1), lr=0.1)
    wrong: list[tuple[type[Exception], str, tuple[Any, ...]]] = [
        (TypeError, "max_staleness must be a number of steps or None, got 1.5", (1.5,)),
        (TypeError, "got True", (True,)),
        (ValueError, "must be >= 0, or None for no limit, got -1", (-1,)),
        (ValueError, "when_stale must be 'refuse' or 'wait', got 'drop'", (1, "drop")),
    ]
    for kind, text, args in wrong:
        with case(text=text), pytest.raises(kind, match=text):
            optimizer.limit_staleness(*args)
    optimizer.close()
