"""A rank with a contestant that is not what it seems; run as a script, by the name of the trouble.

``idle`` does not step; ``raise`` fails on one rank only; ``hang`` waits there for ever.
"""

import os
import sys
import threading

import torch.distributed as dist

from benchmarks import sharded as who
from benchmarks import sharded_peers, sharded_rank
from benchmarks.sharded_models import Task
from benchmarks.sharded_peers import Contestant, wrapped

TROUBLED = who.TORCH_ZERO


def build(task: Task) -> Contestant:
    """The contestant."""
    kind = sys.argv[1]
    if kind == "raise" and dist.get_rank() == 1:
        raise ValueError("on purpose")
    if kind == "hang" and dist.get_rank() == 1:
        threading.Event().wait()
    module = wrapped(task, views=False)
    return Contestant(lambda: None, lambda: iter(module.parameters()))


if __name__ == "__main__":
    os.dup2(2, 1)
    sharded_peers.BUILDERS[TROUBLED] = build
    sharded_rank.main()
