"""Bytes that ranks send while they train, counted by the kernel at their sockets."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import sockets
from benchmarks.averaging import RANKS, WAYS, Way, steps_of
from benchmarks.records import AveragingSent
from benchmarks.sharded_launch import LaunchSettings, run_ranks
from benchmarks.sharded_models import BROAD, TASKS, Batch, Task, numel
from benchmarks.workloads import Size
from hooks import PostLocalSGDOptimizer
from sharding.transport.ring_channel import SWITCH

Tell = Callable[[str], object]
Iterate = Callable[[], None]

DDP_STEPS = 3
"""After so many, DDP has the buckets that it keeps."""
LIMIT_SECONDS = 150.0


def sent(task: Task, ranks: int, tell: Tell, *, names: Sequence[str]) -> list[int]:
    """Bytes that this rank sends in the counted steps of each way."""
    del ranks
    found = []
    for name in names:
        tell(name)
        way = WAYS[name]
        iterate = _iterating(way, task, task.batch(dist.get_rank()))
        for _ in range(max(DDP_STEPS, way.period)):
            iterate()
        dist.barrier()
        before = sockets.sent()
        for _ in range(steps_of(way)):
            iterate()
        # Whoever is here has received everything: it has left the sockets of those who sent it.
        dist.barrier()
        found.append(sockets.since(before))
    return found


def _iterating(way: Way, task: Task, batch: Batch) -> Iterate:
    """A model of its own, and a step of it."""
    module: nn.Module = task.model()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    averager = way.averager(module, 0)
    if averager is None:
        module = DistributedDataParallel(module)
    else:
        optimizer = PostLocalSGDOptimizer(optimizer, averager)

    def iterate() -> None:
        optimizer.zero_grad()
        task.loss(module, batch).backward()
        optimizer.step()

    return iterate


def run_sent(*, size: Size, names: Sequence[str], tell: Tell) -> dict[str, Any]:
    """Count what each way sends.

    Args:
        size: of the model.
        names: keys of WAYS.
        tell: called with the way that is counted.

    Returns:
        What :class:`AveragingSent` is made of, way by way, or why nothing can be counted here.

    Raises:
        RankError: a rank failed, or all were silent.
    """
    why = sockets.uncounted()
    if why is not None:
        return {"skipped": why}
    by_rank = run_ranks(
        "sent",
        BROAD,
        size,
        RANKS,
        {"names": list(names)},
        limit_seconds=LIMIT_SECONDS,
        tell=tell,
        places=LaunchSettings({SWITCH: "0"}),
    )
    module, count = TASKS[BROAD][size].model(), numel(BROAD, size)
    return {
        "sent": [
            AveragingSent(
                name,
                RANKS,
                count,
                steps_of(WAYS[name]),
                list(each),
                WAYS[name].sent_bytes(module, RANKS) * steps_of(WAYS[name]) / WAYS[name].period,
            )
            for name, each in zip(names, zip(*by_rank, strict=True), strict=True)
        ]
    }
