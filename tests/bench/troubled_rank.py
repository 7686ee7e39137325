"""A rank with a contestant that fails on one rank only; run as a script."""

import os

import torch.distributed as dist

from benchmarks import sharded_peers, sharded_rank
from benchmarks.sharded import TORCH_ZERO
from benchmarks.sharded_models import Task
from benchmarks.sharded_peers import Contestant

REAL = sharded_peers.BUILDERS[TORCH_ZERO]


def build(task: Task) -> Contestant:
    """The contestant; the other rank waits for this one, in a collective."""
    if dist.get_rank() == 1:
        raise ValueError("on purpose")
    return REAL(task)


if __name__ == "__main__":
    os.dup2(2, 1)
    sharded_peers.BUILDERS[TORCH_ZERO] = build
    sharded_rank.main()
