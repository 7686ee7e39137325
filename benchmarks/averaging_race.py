"""Training over a slow link: the progress of each way of averaging in the same time."""

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.averaging import RACERS, RANKS, Way
from benchmarks.records import AveragingRace
from benchmarks.sharded_launch import LaunchSettings, run_ranks
from benchmarks.sharded_models import DEMO, Task, numel
from benchmarks.slow_link import INTERFACE, Link, Network, NoLinkError, slow_network
from benchmarks.workloads import Size
from hooks import PostLocalSGDOptimizer, PostLocalSGDState, post_localSGD_hook
from hooks.demo import text
from hooks.demo.model import mean_loss
from sharding.transport.shared_slots import SWITCH

Tell = Callable[[str], object]

SECONDS: dict[Size, float] = {"full": 40.0, "quick": 8.0, "tiny": 0.2}
"""Training time of each way."""
TURNS = 4
"""Number of turns into which the training time is divided."""
LIMIT_SECONDS = 200.0
RATE, RATE_STEPS = 1e-3, 10
"""The learning rate of all ways, and the number of steps in which it rises to this value."""
WARMUP = 4
"""Number of first steps in which gradients are averaged over all ranks."""
POINTS = 20
"""Maximum number of points of a curve, after the first one."""
VALIDATION_SIZE = 128
PROBES, PROBE_NUMEL = 20, 500_000


class _Racer:
    """A model in training, and its curve.

    Args:
        way: the way of averaging.
        task: the model and its data.
        limit: the training time in seconds; later steps do not count.
    """

    def __init__(self, way: Way, task: Task, limit: float) -> None:
        self.way, self._task, self._limit = way, task, limit
        self.module = DistributedDataParallel(
            task.model(), bucket_cap_mb=1, gradient_as_bucket_view=True
        )
        self._optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            self.module.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self.averager = way.averager(self.module, WARMUP)
        if self.averager is not None:
            state = PostLocalSGDState(None, None, WARMUP, post_local_gradient_allreduce=False)
            self.module.register_comm_hook(state, post_localSGD_hook)
            self._optimizer = PostLocalSGDOptimizer(self._optimizer, self.averager)
        self._chance = torch.Generator().manual_seed(1 + dist.get_rank())
        self.steps, self.seconds = 0, 0.0
        self.samples = 0
        """Samples of all ranks."""
        self.steps_in_time, self.samples_in_time = 0, 0
        self._sent, self._last = 0, 0.0
        self._points = [(0.0, self._copies())]

    def step(self) -> None:
        """Make one step."""
        for group in self._optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (self.steps + 1) / RATE_STEPS)
        batch = self._task.draw(self._chance)
        self._task.loss(self.module, batch).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.steps += 1
        self.samples += len(batch[0]) * dist.get_world_size()

    def note(self, seconds: float) -> None:
        """Count a step. Sometimes copy the parameters, if all ranks have the mean."""
        self.seconds = seconds
        sent = 0 if self.averager is None else self.averager.bytes_sent
        has_mean, self._sent = self.averager is None or sent > self._sent, sent
        if seconds > self._limit:
            return
        self.steps_in_time, self.samples_in_time = self.steps, self.samples
        if has_mean and dist.get_rank() == 0 and seconds >= self._last + self._limit / POINTS:
            self._points.append((seconds, self._copies()))
            self._last = seconds

    def rest(self) -> None:
        """Wait for means in the background, so that they do not slow down the next way."""
        if self.averager is not None:
            self.averager.state_dict()

    @torch.no_grad()
    def losses(self) -> list[list[float]]:
        """Return the validation loss at each point."""
        module: Any = self.module.module
        batch = text.even_batch(text.corpus().validation, VALIDATION_SIZE, module.context)
        found = []
        for now, copies in self._points:
            for param, copy in zip(module.parameters(), copies, strict=True):
                param.copy_(copy)
            found.append([now, mean_loss(module, *batch).item()])
        return found

    def _copies(self) -> list[Tensor]:
        return [param.detach().clone() for param in self.module.parameters()]


def _turn(racer: _Racer, until: float, file: Path) -> None:
    """Train until rank 0 stops the turn by its clock. Rank 0 writes the last step to a file.

    A rank that is ahead of rank 0 waits for rank 0 at the next mean, at most one period later. So
    it reads the file before it has made more steps than the file says.
    """
    dist.barrier()
    begin, stop = time.perf_counter() - racer.seconds, None
    while stop is None or racer.steps < stop:
        racer.step()
        racer.note(time.perf_counter() - begin)
        if stop is None and dist.get_rank() == 0 and racer.seconds >= until:
            stop = racer.steps + racer.way.period + 1
            part = file.with_suffix(".part")
            part.write_text(str(stop), encoding="ascii")
            part.rename(file)
        elif stop is None and file.exists():
            stop = int(file.read_text(encoding="ascii"))
    racer.rest()
    racer.seconds = time.perf_counter() - begin


def race(
    task: Task, ranks: int, tell: Tell, *, names: Sequence[str], seconds: float, folder: str
) -> dict[str, Any]:
    """Train each way for some time, in turns. Return the results of rank 0.

    Args:
        task: the task with the demo's model and text.
        ranks: the number of ranks.
        tell: called with the way whose turn it is.
        names: keys of RACERS.
        seconds: the training time of each way.
        folder: an empty folder that all ranks can read.
    """
    tell("the link")
    found: dict[str, Any] = {"link": probed() if ranks > 1 else {}}
    racers = {name: _Racer(RACERS[name], task, seconds) for name in names}
    for turn in range(TURNS):
        for place, (name, racer) in enumerate(racers.items()):
            tell(name)
            _turn(racer, seconds * (turn + 1) / TURNS, Path(folder) / f"{turn}-{place}")
    found["racers"] = [
        {"steps": one.steps_in_time, "samples": one.samples_in_time, "curve": one.losses()}
        for one in racers.values()
    ]
    return found


def probed() -> dict[str, float]:
    """Return the round trip and the bandwidth between ranks 0 and 1. The other ranks wait."""
    rank = dist.get_rank()
    small, large, trips = torch.zeros(1), torch.zeros(PROBE_NUMEL), []
    for sent in [small] * PROBES + [large]:
        begin = time.perf_counter()
        if rank == 0:
            dist.send(sent, 1)
            dist.recv(small, 1)
        elif rank == 1:
            dist.recv(sent, 0)
            dist.send(small, 0)
        trips.append(time.perf_counter() - begin)
    dist.barrier()
    trip, whole = median(trips[:-1]), trips[-1]
    megabits = 8e-6 * large.nbytes / max(whole - trip, 1e-9)
    return {"round_trip_milliseconds": 1e3 * trip, "found_megabits": megabits}


def run_races(*, size: Size, names: Sequence[str], tell: Tell) -> dict[str, Any]:
    """Train over a slow link, in turns.

    Args:
        size: the size of the model.
        names: keys of RACERS.
        tell: called with the way whose turn it is.

    Returns:
        The results, or the reason why this machine can have no slow link.

    Raises:
        RankError: a rank failed, or all were silent.
    """
    try:
        with slow_network(RANKS, Link()) as network:
            return {"races": _raced(size, names, network, tell)}
    except NoLinkError as error:
        return {"skipped": str(error)}


def _raced(size: Size, names: Sequence[str], network: Network, tell: Tell) -> list[AveragingRace]:
    places = LaunchSettings({SWITCH: "0", "GLOO_SOCKET_IFNAME": INTERFACE}, network.within)
    with tempfile.TemporaryDirectory(prefix="race-") as folder:
        given = {"names": list(names), "seconds": SECONDS[size], "folder": folder}
        limit = LIMIT_SECONDS
        found = run_ranks(
            "race", DEMO, size, RANKS, given, limit_seconds=limit, tell=tell, places=places
        )[0]
    megabits, delay = network.link
    return [
        AveragingRace(
            name,
            RANKS,
            numel(DEMO, size),
            SECONDS[size],
            megabits,
            delay,
            network.no_delay,
            **found["link"],
            **one,
        )
        for name, one in zip(names, found["racers"], strict=True)
    ]
