"""Jobs that get a pool of ranks into trouble: failures, waits, and deaths."""

import os
import time
from typing import Any

import torch
import torch.distributed as dist

from sharding.testing import at


def rank_and_sum(add: int) -> dict[str, Any]:
    total = torch.tensor(float(dist.get_rank() + add))
    dist.all_reduce(total)
    return {"rank": dist.get_rank(), "ranks": dist.get_world_size(), "sum": total.item()}


def fails_on(rank: int) -> str:
    if dist.get_rank() == rank:
        raise LookupError("nothing here")
    return "fine"


def waits_for_the_other() -> None:
    """Make rank 0 wait in a collective for rank 1, which is busy."""
    if dist.get_rank() == 1:
        at("the work")
        sleeps_too_long()
    at("the barrier")
    dist.barrier()


def sleeps_too_long() -> None:
    time.sleep(600)


def dies_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    time.sleep(600)


def a_function() -> Any:
    return lambda: None


def pid() -> int:
    return os.getpid()


def waits_for_one_that_leaves() -> str:
    """End rank 1, finish rank 0, and make rank 2 wait for rank 0."""
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(0)
    if dist.get_rank() == 0:
        return "done"
    try:
        dist.recv(torch.zeros(1), src=0)
    except RuntimeError as error:
        return f"told: {error}"
    return "received"
