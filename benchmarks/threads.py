"""Two models that two threads step at once, and a Python thread beside a thread that steps."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from threading import Event

import torch

from benchmarks.cases import CASES, Step
from benchmarks.contestants import Contestants
from benchmarks.records import Threads
from benchmarks.timing import quiet, seconds_per_step, steps_in_a_turn
from benchmarks.workloads import Shape, Size

MODELS: dict[Size, list[Shape]] = {
    "full": [(5000,)] * 200,
    "quick": [(5000,)] * 50,
    "tiny": [(50,)] * 4,
}
"""Shapes of each of the two models. They fit into the caches, so that memory is not the
bottleneck."""

WAYS = (
    "blocked",
    "compiled",
    "torch for-loop",
    "torch foreach",
    "torch fused",
    "torch functional",
)
RULE = "AdamW"


def run_threads(*, way: str, size: Size, rounds: int, turn_seconds: float) -> Threads:
    """Measure one way with one thread inside each step. Only the two threads run in parallel."""
    assert torch.get_num_threads() == 1
    groups = [Contestants(MODELS[size], size, CASES[RULE]) for _ in range(2)]
    first, second = (group.build(way) for group in groups)
    with ThreadPoolExecutor(2) as pool:
        return _compare(pool, way, first, second, rounds, turn_seconds)


def _nothing() -> None:
    return None


def _python(count: int) -> int:
    """Run a loop that has nothing to do with optimizers."""
    total = 0
    for number in range(count):
        total += number
    return total


def _loop(step: Step, count: int) -> None:
    for _ in repeat(None, count):
        step()


def _compare(
    pool: ThreadPoolExecutor, way: str, first: Step, second: Step, rounds: int, turn_seconds: float
) -> Threads:
    _loop(first, 2)
    _loop(second, 2)
    count = steps_in_a_turn(first, _nothing, turn_seconds)

    def one_after_other() -> None:
        pool.submit(_loop, first, count).result()
        pool.submit(_loop, second, count).result()

    def together() -> None:
        list(pool.map(_loop, (first, second), (count, count)))

    together()  # starts and warms up both threads of the pool
    numbers = steps_in_a_turn(lambda: _python(10_000), _nothing, turn_seconds) * 10_000

    def unrelated() -> None:
        _python(numbers)

    result = Threads(way, [], [])
    with quiet():
        for _ in range(rounds):
            result.one_after_other.append(seconds_per_step(one_after_other, _nothing, 1))
            result.together.append(seconds_per_step(together, _nothing, 1))
            result.alone.append(seconds_per_step(unrelated, _nothing, 1))
            result.beside.append(_beside(pool, first, unrelated))
    return result


def _beside(pool: ThreadPoolExecutor, step: Step, unrelated: Callable[[], None]) -> float:
    """Return the seconds of a function while another thread steps."""
    begun, ended = Event(), Event()

    def steps() -> None:
        step()
        begun.set()
        while not ended.is_set():
            step()

    stepping = pool.submit(steps)
    begun.wait()
    try:
        return seconds_per_step(unrelated, _nothing, 1)
    finally:
        ended.set()
        stepping.result()
