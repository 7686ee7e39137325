"""What ranks send while they train, counted by the kernel at their sockets."""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from benchmarks import sockets
from benchmarks.averaging import RANKS, WAYS, Trainer, steps_of
from benchmarks.records import AveragingSent
from benchmarks.sharded_launch import Places, run_ranks
from benchmarks.sharded_models import BROAD, TASKS, Batch, Task, numel
from benchmarks.workloads import Size
from sharding.transport.lane import SWITCH

Tell = Callable[[str], object]

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
        trainer, batch = way.trainer(task.model()), task.batch(dist.get_rank())
        _train(task, trainer, batch, max(DDP_STEPS, way.period))
        dist.barrier()
        before = sockets.sent()
        _train(task, trainer, batch, steps_of(way))
        # Whoever is here has received everything: it has left the sockets of those who sent it.
        dist.barrier()
        found.append(sockets.since(before))
    return found


def _train(task: Task, trainer: Trainer, batch: Batch, steps: int) -> None:
    for _ in range(steps):
        trainer.optimizer.zero_grad()
        task.loss(trainer.module, batch).backward()
        trainer.optimizer.step()


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
        places=Places({SWITCH: "0"}),
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
