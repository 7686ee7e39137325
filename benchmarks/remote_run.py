"""Model on one server: the turns of all contestants, for each rule and number of trainers."""

import math
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

from torch.distributed import rpc

from benchmarks import remote as who
from benchmarks.records import Remote
from benchmarks.remote_server import TRAINER, join, python_seconds, serve
from benchmarks.remote_ways import Trainers, Way, way
from benchmarks.timing import quiet, steps_in_a_turn
from benchmarks.workloads import Size

Tell = Callable[[str], object]

LOOP = 10_000
"""Base count of the numbers that the Python thread adds up."""


def run_remote(
    *, model: str, rules: Sequence[str], size: Size, rounds: int, tell: Tell
) -> list[Remote]:
    """Start a server beside this process, and measure.

    Args:
        model: a key of MODELS.
        rules: keys of RULES.
        size: the size of the model.
        rounds: the number of turns of each contestant.
        tell: called with the name of each measurement.
    """
    with tempfile.TemporaryDirectory(prefix="remote-") as folder:
        meeting = str(Path(folder) / "meeting")
        # A daemon ends with this process, also after an error.
        process = multiprocessing.get_context("spawn").Process(
            target=serve, args=(meeting,), daemon=True
        )
        process.start()
        with joined(meeting):
            found = measured(model, rules, size, rounds, tell)
        process.join()
        return found


@contextmanager
def joined(meeting: str) -> Iterator[None]:
    """Join the server as the trainers' process. After an error, do not wait for the server."""
    join(TRAINER, meeting)
    yield
    rpc.shutdown()


def measured(model: str, rules: Sequence[str], size: Size, rounds: int, tell: Tell) -> list[Remote]:
    """Measure each rule with each number of trainers."""
    found = []
    for rule in rules:
        with ExitStack() as stack:
            ways, failed = _built(model, rule, size, stack)
            for trainers in who.TRAINERS:
                tell(f"{rule}, trainers: {trainers}")
                found.append(_heat(ways, trainers, model, rule, size, rounds, failed))
    return found


def _built(
    model: str, rule: str, size: Size, stack: ExitStack
) -> tuple[dict[str, Way], dict[str, str]]:
    """Build and warm up the contestants of a rule. Return them, and the errors of failed ones."""
    ways: dict[str, Way] = {}
    failed: dict[str, str] = {}
    for name in who.names_of(rule):
        try:
            made = way(name, rule, who.MODELS[model].parameters(size))
            stack.callback(made.close)
            _warmed(made, who.WARM_SECONDS[size])
        except Exception as error:  # noqa: BLE001  the others are measured all the same
            failed[name] = f"{type(error).__name__}: {error}"[:1000]
        else:
            ways[name] = made
    return ways, failed


def _warmed(way: Way, seconds: float) -> None:
    """Step for some time.

    Raises:
        RuntimeError: a parameter has not changed.
    """
    end = time.perf_counter() + seconds
    with way.gradients() as gradients:
        for number in count():
            if number >= 3 and time.perf_counter() >= end:
                break
            way.step(gradients)
    if not all(way.moved()):
        raise RuntimeError("a step left a parameter as it was, though it has a gradient")


def _heat(
    ways: Mapping[str, Way],
    trainers: int,
    model: str,
    rule: str,
    size: Size,
    rounds: int,
    failed: Mapping[str, str],
) -> Remote:
    """Time all contestants in turns. Each round begins with another one."""
    shapes, turn_seconds = who.MODELS[model].parameters(size), who.TURN_SECONDS[size]
    numel = who.MODELS[model].numel(size)
    result = Remote(model, rule, trainers, numel, len(shapes), {}, {}, {}, dict(failed))
    numbers = LOOP * steps_in_a_turn(lambda: python_seconds(LOOP), lambda: None, turn_seconds / 2)
    with ExitStack() as stack:
        teams = {name: stack.enter_context(Trainers(one, trainers)) for name, one in ways.items()}
        counts = {
            name: math.ceil(turn_seconds / (team.seconds_per_step(2) * trainers))
            for name, team in teams.items()
        }
        for times in (result.seconds, result.alone, result.beside):
            times.update({name: [] for name in ways})
        names = list(ways)
        with quiet():
            for number in range(rounds if names else 0):
                shift = number % len(names)
                for name in names[shift:] + names[:shift]:
                    team = teams[name]
                    team.seconds_per_step(1)  # brings the contestant's data into the caches
                    result.seconds[name].append(team.seconds_per_step(counts[name]))
                    result.alone[name].append(ways[name].python_seconds(numbers))
                    result.beside[name].append(team.python_seconds(numbers))
    return result
