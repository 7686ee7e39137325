"""Processes of ``--front-end rpc``: rank 0 trains, the others own the parameters.

Started by ``torchrun`` (see ``launch.py``), which ends all of them when one dies.
"""

import os
from collections.abc import Sequence
from functools import partial

from hooks.demo.front_ends import ComparedRun
from hooks.demo.processes import rpc_process
from hooks.demo.rpc_run import InThisProcess, OnWorkers
from hooks.demo.train import given, train_ways

TRAINER = "trainer"


def ways(workers: Sequence[str]) -> list[ComparedRun]:
    """Return the compared runs of one process that has these workers."""
    where = f"{len(workers)} worker{'s' if len(workers) > 1 else ''}"
    here, away = InThisProcess, partial(OnWorkers, workers=workers)
    return [
        ComparedRun("A", "torch.optim.AdamW, in one process", here, exact=True),
        ComparedRun("B", f"DistributedOptimizer, parameters on {where}", away, exact=True),
    ]


def main() -> None:
    """Entry point of a process."""
    settings, folder = given("One process of `functional-optim demo --front-end rpc`.")
    rank = int(os.environ["RANK"])
    names = [TRAINER, *(f"worker{one}" for one in range(1, settings.ranks))]
    with rpc_process(names[rank], rank, settings.ranks):
        if rank == 0:
            found = ways(names[1:])
            train_ways(settings, found, lambda way, *of: way.make(way, *of), rank=0).save(folder)


if __name__ == "__main__":
    main()
