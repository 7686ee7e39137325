"""A rank with a contestant that fails; run as a script."""

import os

from benchmarks import sharded_peers, sharded_rank
from benchmarks.sharded import TORCH_ZERO
from benchmarks.sharded_models import Task
from benchmarks.sharded_peers import Contestant


def build(task: Task) -> Contestant:
    """Fail instead of building a contestant."""
    raise ValueError("on purpose")


if __name__ == "__main__":
    os.dup2(2, 1)
    sharded_peers.BUILDERS[TORCH_ZERO] = build
    sharded_rank.main()
