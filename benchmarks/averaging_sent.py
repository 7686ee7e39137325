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
from sharding.transport.shared_slots import SWITCH

Tell = Callable[[str], object]
Iterate = Callable[[], None]

DDP_STEPS = 3
"""Number of steps after which DDP keeps its buckets."""
LIMIT_SECONDS = 150.0


def sent(task: Task, ranks: int, tell: Tell, *, names: Sequence[str]) -> list[int]:
    """Return the bytes that this rank sends in the counted steps of each way."""
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
        # A rank that is here has received all messages, so their senders have sent them.
        dist.barrier()
        found.append(sockets.since(before))
    return found


def _iterating(way: Way, task: Task, batch: Batch) -> Iterate:
    """Build a model, and return a function that makes one step with it."""
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
    """Count the bytes that each way sends.

    Args:
        size: the size of the model.
        names: keys of WAYS.
        tell: called with the way that is counted.

    Returns:
        The results of each way, or the reason why this machine cannot count bytes.

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
