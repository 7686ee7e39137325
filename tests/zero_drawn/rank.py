"""One rank that takes cases from a folder for as long as there are any (see ``pool.py``).

Each case has a process group of its own, made and ended as ``tests/ddp`` does it.
"""

import gc
import importlib.util
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

PAUSE_SECONDS = 0.003


def house() -> Any:
    """The rank of ``tests/ddp``, with the jobs of this folder."""
    here = Path(__file__)
    place = here.parents[1] / "ddp" / "rank.py"
    spec = importlib.util.spec_from_file_location("house_rank", place)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    found.__file__ = str(here)  # the package of jobs is the folder of this file
    return found


def next_job(folder: Path, number: int) -> Any:
    """The job of that number, once it is there."""
    path, parent = folder / f"job.{number}", os.getppid()
    while not path.exists():
        if os.getppid() != parent:
            os._exit(1)  # nobody is left who would hand one in
        time.sleep(PAUSE_SECONDS)
    return json.loads(path.read_text())


def main(folder: Path, rank: int) -> None:
    """Every job that comes; None is the last."""
    shared = house()
    shared.start(folder, rank)
    for number in itertools.count():
        job = next_job(folder, number)
        if job is None:
            break
        shared.leave(folder, f"at.{rank}", job["name"])
        ranks = job["arguments"]["case"]["world"]
        if rank < ranks:
            store = shared.connect(folder, job, rank, ranks)
            shared.end_together(store, rank, ranks, well=shared.work(folder, rank, job))
            dist.destroy_process_group()
            shared.KEPT.clear()  # they are many, and no hook here outlives its group
        if number == 0:
            gc.collect()
            gc.freeze()  # modules stay: later collections need not look at them
        gc.collect()
    shared.leave(folder, f"at.{rank}", "the end")
    os._exit(0)  # with the threads of all those groups


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
