"""Turns: contestants are timed one after the other, round by round.

Disturbances of the machine then affect all contestants, and ratios are taken within a round.
"""

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import repeat

Step = Callable[[], object]
Wait = Callable[[], object]

LONG_SECONDS = 0.2
"""Length of a step after which no data of the previous contestant is in any cache."""


@contextmanager
def quiet() -> Iterator[None]:
    """Turn off garbage collection while something is timed."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def seconds_per_step(step: Step, wait: Wait, count: int) -> float:
    """Return the time of ``count`` steps, divided by ``count``."""
    wait()
    begin = time.perf_counter()
    for _ in repeat(None, count):
        step()
    wait()
    return (time.perf_counter() - begin) / count


def steps_in_a_turn(step: Step, wait: Wait, turn_seconds: float) -> int:
    """Return the number of steps that fill a turn; at least one."""
    once = seconds_per_step(step, wait, 1)
    if once < turn_seconds / 10:  # one step is too short for a good estimate
        once = seconds_per_step(step, wait, max(1, math.ceil(turn_seconds / 10 / max(once, 1e-7))))
    return max(1, math.ceil(turn_seconds / max(once, 1e-7)))


def take_turns(
    steps: dict[str, Step],
    *,
    rounds: int,
    turn_seconds: float,
    wait: Wait,
    tell: Callable[[int], object],
) -> dict[str, list[float]]:
    """Return the seconds per step of every contestant, one figure per round.

    Args:
        steps: the contestants by name.
        rounds: the number of turns of each contestant. Each round begins with another contestant.
        turn_seconds: the minimum length of a turn.
        wait: returns when the device has finished all work.
        tell: called with the number of each finished round.
    """
    counts = {name: steps_in_a_turn(step, wait, turn_seconds) for name, step in steps.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    with quiet():
        for number in range(rounds):
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                if not seconds[name] or seconds[name][-1] < LONG_SECONDS:
                    steps[name]()  # brings the contestant's data into the caches
                seconds[name].append(seconds_per_step(steps[name], wait, counts[name]))
            tell(number + 1)
    return seconds
