"""Ranks that train over a slow link: how far each way of averaging comes in the same time."""

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.averaging import RACERS, RANKS, Way
from benchmarks.records import AveragingRace
from benchmarks.sharded_launch import Places, RankError, run_ranks
from benchmarks.sharded_models import DEMO, Task, numel
from benchmarks.slow_link import INTERFACE, Link, Network, NoLinkError, slow_network
from benchmarks.workloads import Size
from hooks import ModelAverager, PostLocalSGDOptimizer, PostLocalSGDState, post_localSGD_hook
from hooks.demo import text
from hooks.demo.model import mean_loss
from sharding.transport.lane import SWITCH

Tell = Callable[[str], object]

SECONDS: dict[Size, float] = {"full": 40.0, "quick": 8.0, "tiny": 0.2}
"""For how long each trains."""
LIMIT_SECONDS = 200.0
RATE, RATE_STEPS = 1e-3, 10
"""The learning rate, for all, and in how many steps it rises to that."""
WARMUP = 4
"""Steps in which gradients are averaged over all ranks, before anybody trains on their own."""
POINTS = 20
"""Of a curve, at most, after the first."""
VALIDATION_SIZE = 128
PROBES, PROBE_NUMEL = 20, 500_000


class _Racer(NamedTuple):
    """A model, and how it is trained."""

    module: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    averager: ModelAverager | None


def _racer(way: Way, task: Task) -> _Racer:
    module = DistributedDataParallel(task.model(), bucket_cap_mb=1, gradient_as_bucket_view=True)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(
        module.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    averager = way.averager(module, WARMUP)
    if averager is not None:
        state = PostLocalSGDState(None, None, WARMUP, post_local_gradient_allreduce=False)
        module.register_comm_hook(state, post_localSGD_hook)
        optimizer = PostLocalSGDOptimizer(optimizer, averager)
    return _Racer(module, optimizer, averager)


class _Clock:
    """When all ranks stop: rank 0 decides, by its clock, and says so in a file.

    No message is sent for that. A rank that is ahead has met rank 0 within the last period, or
    waits for it, and so it sees the file before it has made two periods more.
    """

    def __init__(self, seconds: float, period: int, file: Path) -> None:
        self._seconds, self._period, self._file = seconds, period, file
        self._stop: int | None = None
        self._begin = time.perf_counter()
        self.made = 0
        """Steps of this rank in the time."""

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.perf_counter() - self._begin

    def goes_on(self, steps: int) -> bool:
        """Whether a rank that has made so many steps makes another one."""
        if self.seconds < self._seconds:
            self.made = steps
        elif self._stop is None and dist.get_rank() == 0:
            self._stop = steps + 2 * self._period
            part = self._file.with_suffix(".part")
            part.write_text(str(self._stop), encoding="ascii")
            part.rename(self._file)
        if self._stop is None:
            with suppress(FileNotFoundError):
                self._stop = int(self._file.read_text(encoding="ascii"))
        return self._stop is None or steps < self._stop


class _Curve:
    """Copies of parameters, taken while training goes on; they are judged when it is over."""

    def __init__(self, racer: _Racer, seconds: float) -> None:
        self._racer, self._limit = racer, seconds
        self._sent, self._last = 0, 0.0
        self._points = [(0.0, self._copies())]

    def after_step(self, now: float) -> None:
        """Take a copy where a mean has just been taken, and the last copy is some time ago."""
        sent = 0 if self._racer.averager is None else self._racer.averager.bytes_sent
        has_mean = self._racer.averager is None or sent > self._sent
        if has_mean and self._last + self._limit / POINTS <= now <= self._limit:
            self._points.append((now, self._copies()))
            self._last = now
        self._sent = sent

    @torch.no_grad()
    def losses(self) -> list[list[float]]:
        """The validation loss at each point."""
        module: Any = self._racer.module.module
        batch = text.even_batch(text.corpus().validation, VALIDATION_SIZE, module.context)
        found = []
        for now, copies in self._points:
            for param, copy in zip(module.parameters(), copies, strict=True):
                param.copy_(copy)
            found.append([now, mean_loss(module, *batch).item()])
        return found

    def _copies(self) -> list[Tensor]:
        return [param.detach().clone() for param in self._racer.module.parameters()]


def race(task: Task, ranks: int, *, name: str, seconds: float, file: str) -> dict[str, Any]:
    """Train for some time; what rank 0 has come to.

    Args:
        task: with the demo's model and text.
        ranks: how many train.
        name: a key of RACERS.
        seconds: for how long.
        file: that is not there yet, and that all ranks can see.
    """
    rank, way = dist.get_rank(), RACERS[name]
    chance = torch.Generator().manual_seed(1 + rank)
    found = probed() if ranks > 1 else {}
    racer = _racer(way, task)
    curve, steps, batch_size = _Curve(racer, seconds), 0, 0
    dist.barrier()
    clock = _Clock(seconds, way.period, Path(file))
    while clock.goes_on(steps):
        for group in racer.optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (steps + 1) / RATE_STEPS)
        batch = task.draw(chance)
        batch_size = len(batch[0])
        task.loss(racer.module, batch).backward()
        racer.optimizer.step()
        racer.optimizer.zero_grad()
        steps += 1
        if rank == 0:
            curve.after_step(clock.seconds)
    samples = clock.made * batch_size * ranks
    if rank:
        return {}
    return {**found, "steps": clock.made, "samples": samples, "curve": curve.losses()}


def probed() -> dict[str, float]:
    """The link between ranks 0 and 1, as they find it; the others wait."""
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
    """Let each train over a slow link, one after the other.

    Args:
        size: of the model.
        names: keys of RACERS.
        tell: called with who trains.

    Returns:
        What :class:`AveragingRace` is made of, or why there can be no slow link here.
    """
    try:
        with slow_network(RANKS, Link()) as network:
            return {"races": [_one(name, size, network, tell) for name in names]}
    except NoLinkError as error:
        return {"skipped": str(error)}


def _one(name: str, size: Size, network: Network, tell: Tell) -> AveragingRace:
    seconds, (megabits, delay) = SECONDS[size], network.link
    found = AveragingRace(
        name, RANKS, numel(DEMO, size), seconds, megabits, delay, network.no_delay
    )
    places = Places({SWITCH: "0", "GLOO_SOCKET_IFNAME": INTERFACE}, network.within)
    with tempfile.TemporaryDirectory(prefix="race-") as folder:
        given = {"name": name, "seconds": seconds, "file": str(Path(folder) / "stop")}
        try:
            answers = run_ranks(
                "race",
                DEMO,
                size,
                RANKS,
                given,
                limit_seconds=LIMIT_SECONDS,
                tell=tell,
                places=places,
            )
        except RankError as error:
            return replace(found, failed=str(error))
    return replace(found, **answers[0])
