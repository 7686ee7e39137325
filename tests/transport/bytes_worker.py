"""Program that counts the bytes that four ranks send; ``test_bytes.py`` runs it.

A program can be started in a network namespace that no other process uses.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from sharding.transport import make_transport, shared_slots
from tests.ranks import Job, run_ranks

from .buffers import CUTS

NUMEL = 1 << 20
TRIES = 3


def count() -> list[dict[str, Any]]:
    """Count the bytes of groups of 2 and 4 ranks, with and without shared memory.

    The counts are those of the loopback interface, and those of the transport.
    """
    groups = [dist.new_group([0, 1]), dist.group.WORLD]
    return [
        {"ranks": size, "memory": memory, **_counted(group, size, memory)}
        for size, group in zip((2, 4), groups, strict=True)
        for memory in ("0", "1")
    ]


def _counted(group: Any, size: int, memory: str) -> dict[str, int]:
    mine = dist.get_rank() < size
    flat, ranges = torch.ones(NUMEL), CUTS["even"](NUMEL, size)
    with mock.patch.dict(os.environ, {shared_slots.SWITCH: memory}):
        transport = make_transport(group) if mine else None

        def exchange() -> None:
            if transport is not None:
                transport.reduce_scatter(flat, ranges).wait()
                transport.all_gather(flat, ranges).wait()

        def all_reduce() -> None:
            if mine:
                dist.all_reduce(flat, group=group)

        exchanged = min(_loopback(exchange) for _ in range(TRIES))
    sent = torch.tensor([transport.bytes_sent if transport else 0])
    dist.all_reduce(sent)
    return {
        "exchange": exchanged,
        "all_reduce": min(_loopback(all_reduce) for _ in range(TRIES)),
        "counter": int(sent.item()) // TRIES,
    }


def _loopback(operation: Callable[[], object]) -> int:
    """Return the bytes sent through the loopback interface while all ranks run an operation."""
    before = _settled()
    operation()
    return _settled() - before


def _settled() -> int:
    dist.barrier()  # all sent bytes have arrived and were counted
    table = Path("/proc/net/dev").read_text().splitlines()
    lines = [line.split() for line in table if line.strip().startswith("lo:")]
    dist.barrier()  # no rank continues before all ranks have read the counter
    return int(lines[0][9])


def main() -> None:
    found = run_ranks({"count": Job(count)}, ranks=4, seconds=120, fresh=True)
    sys.stdout.write(json.dumps(found["count"][0].result()))


if __name__ == "__main__":
    from tests.transport import bytes_worker  # noqa: PLW0406  by a name that the ranks can import

    bytes_worker.main()
