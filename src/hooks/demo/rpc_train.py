"""Processes of ``--front-end rpc``: rank 0 trains, the others own the parameters.

Started by ``torchrun`` (see ``launch.py``), which ends all of them when one dies.
"""

import os
from collections.abc import Sequence
from functools import partial

from hooks.demo.front_ends import ComparedRun
from hooks.demo.processes import rpc_process
from hooks.demo.rpc_run import LocalRun, WorkerRun
from hooks.demo.train import parse_arguments, train_and_compare

TRAINER = "trainer"


def compared_runs(workers: Sequence[str]) -> list[ComparedRun]:
    """Return the runs to compare, for a process with these workers."""
    where = f"{len(workers)} worker{'s' if len(workers) > 1 else ''}"
    here, away = LocalRun, partial(WorkerRun, workers=workers)
    return [
        ComparedRun("A", "torch.optim.AdamW, in one process", here, exact=True),
        ComparedRun("B", f"DistributedOptimizer, parameters on {where}", away, exact=True),
    ]


def main() -> None:
    settings, folder = parse_arguments("One process of `functional-optim demo --front-end rpc`.")
    rank = int(os.environ["RANK"])
    names = [TRAINER, *(f"worker{one}" for one in range(1, settings.ranks))]
    with rpc_process(names[rank], rank, settings.ranks):
        if rank == 0:
            specs = compared_runs(names[1:])
            train_and_compare(
                settings, specs, lambda spec, *more: spec.build(spec, *more), rank=0
            ).save(folder)


if __name__ == "__main__":
    main()
