"""Averaging over a slow link, measured on the ranks that all tests share."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks import averaging as who
from benchmarks import averaging_race, averaging_sent, sockets
from benchmarks.sharded_models import BROAD, DEMO, TASKS
from sharding.transport.shared_slots import SWITCH
from tests.choices import case
from tests.ranks import Job, run_ranks

from ..conftest import PATIENCE

UNCOUNTED = sockets.uncounted()
HEADERS_BYTES = 6000
"""Upper bound of all message headers of a period: for a small model, they are a large share."""


def count() -> list[int]:
    """Return the bytes that each way of averaging sends from this rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, "0")
        names, ranks = list(who.WAYS), dist.get_world_size()
        return averaging_sent.sent(TASKS[BROAD]["tiny"], ranks, print, names=names)


def race(folder: str) -> dict[str, Any]:
    """Train in every way of averaging on this rank."""
    task, names = TASKS[DEMO]["tiny"], list(who.RACERS)
    return averaging_race.race(task, 4, print, names=names, seconds=0.2, folder=folder)


def test_ranks_stop_together_and_begin_alike(tmp_path: Path) -> None:
    """All ranks stop a turn at the same step, and all ways start from the same loss.

    Otherwise a rank would wait for a mean that no other rank takes.
    """
    job = Job(race, {"folder": str(tmp_path)})
    every = run_ranks({"race": job}, ranks=who.RANKS, seconds=PATIENCE)["race"]
    found = every[0].result()
    assert min(found["link"].values()) > 0
    begins = {tuple(one["curve"][0]) for one in found["racers"]}
    assert len(found["racers"]) == len(who.RACERS) and len(begins) == 1
    stops = [int(file.read_text()) for file in sorted(tmp_path.iterdir())]
    assert len(stops) == averaging_race.TURNS * len(who.RACERS)
    for place, racer in enumerate(found["racers"]):
        turns = stops[place :: len(who.RACERS)]
        assert turns == sorted(set(turns))
        assert racer["steps"] <= turns[-1] and racer["samples"] == racer["steps"] * 2 * who.RANKS
    first = found["racers"][0]["curve"][0]
    assert [one.result()["racers"][0]["curve"] for one in every[1:]] == [[first]] * 3


@pytest.mark.skipif(UNCOUNTED is not None, reason=str(UNCOUNTED))
def test_what_is_sent_is_what_the_arithmetic_says() -> None:
    every = run_ranks({"count": Job(count)}, ranks=who.RANKS, seconds=PATIENCE)["count"]
    module = TASKS[BROAD]["tiny"].model()
    for place, (name, way) in enumerate(who.WAYS.items()):
        periods = who.steps_of(way) / way.period
        expected = way.sent_bytes(module, who.RANKS) * periods
        with case(name=name):
            for rank in every:
                assert 0 <= rank.result()[place] - expected <= HEADERS_BYTES * periods
