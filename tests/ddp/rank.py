"""One rank: runs the jobs that ``processes.py`` left in a folder, and leaves the outcomes there.

Run as a script: ``rank.py FOLDER [RANK RANKS]``; without the numbers it was started by torchrun.
"""

import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import json
import os
import signal
import sys
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PACKAGE = "tests_ddp"
"""The name under which a rank knows this folder; it needs no place on the module search path."""


def load_package() -> None:
    """Make this folder a package, whatever the working directory and the search path are."""
    here = Path(__file__).parent
    spec = importlib.util.spec_from_file_location(
        PACKAGE, here / "__init__.py", submodule_search_locations=[str(here)]
    )
    assert spec is not None and spec.loader is not None
    sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[PACKAGE])


def set_up() -> None:
    """What all jobs share."""
    load_package()
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)  # OMP_NUM_THREADS does not reach all pools
    warnings.simplefilter("error")
    warnings.filterwarnings(
        "ignore", message="You passed find_unused_parameters=true", category=UserWarning
    )  # with static_graph, which is one of the cases


def run(job: dict[str, Any]) -> dict[str, Any]:
    """The outcome of one job, the process group being there."""
    start = time.monotonic()
    try:
        module = importlib.import_module(f"{PACKAGE}.{job['module']}")
        value = getattr(module, job["function"])(**job["arguments"])
    except Exception as error:  # noqa: BLE001  the parent decides what to make of it
        text = f"{type(error).__name__}: {error}"
        return {"error": text, "traceback": traceback.format_exc()}
    return {"value": value, "seconds": time.monotonic() - start}


def leave(folder: Path, name: str, text: str) -> None:
    """Write a file at once: the parent must not find half of it."""
    (folder / f"{name}.part").write_text(text)
    (folder / f"{name}.part").replace(folder / name)


KEPT: list[dist.ProcessGroup | None] = []
"""Groups of finished jobs. A callback of torch's PowerSGD may be the last to hold its group, and
would then end, in one of that group's own threads, by waiting for that thread: std::terminate."""


def connect(folder: Path, job: dict[str, Any], rank: int, ranks: int) -> dist.Store:
    """A process group of this job's own, once all ranks have come to it."""
    store = dist.FileStore(str(folder / f"{job['name']}.store"), ranks)
    store.set(f"here {rank}", "")
    store.wait([f"here {other}" for other in range(ranks)], timedelta(seconds=120))
    seconds = timedelta(seconds=job["group_seconds"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=seconds)
    KEPT.append(dist.group.WORLD)
    return store


def end_together(store: dist.Store, rank: int, ranks: int, *, well: bool) -> None:
    """Keep connections open while others may still be making theirs to this rank.

    A rank with little to do would otherwise close them before the other end has seen them open.
    """
    store.set(f"done {rank}", "")
    if not well:
        return
    with contextlib.suppress(RuntimeError):  # a rank that was killed does not come
        store.wait([f"done {other}" for other in range(ranks)], timedelta(seconds=5))


def start(folder: Path, rank: int) -> list[dict[str, Any]]:
    """The jobs."""
    leave(folder, f"pid.{rank}", str(os.getpid()))
    set_up()
    jobs: list[dict[str, Any]] = json.loads((folder / "jobs.json").read_text())
    return jobs


def work(folder: Path, rank: int, job: dict[str, Any]) -> bool:
    """One job, and its outcome; whether it ended well."""
    outcome = run(job)
    leave(folder, f"{job['name']}.{rank}.json", json.dumps(outcome))
    return "error" not in outcome


def main(folder: Path, rank: int, ranks: int) -> None:
    """Jobs that have a process group each."""
    for job in start(folder, rank):
        leave(folder, f"at.{rank}", job["name"])
        store = connect(folder, job, rank, ranks)
        end_together(store, rank, ranks, well=work(folder, rank, job))
        dist.destroy_process_group()
        gc.collect()
    leave(folder, f"at.{rank}", "the end")
    os._exit(0)  # with the threads of all those groups


def main_under_torchrun(folder: Path) -> None:
    """Jobs that share the process group of torchrun's environment."""
    rank = int(os.environ["RANK"])
    jobs = start(folder, rank)
    dist.init_process_group("gloo")
    for job in jobs:
        leave(folder, f"at.{rank}", job["name"])
        work(folder, rank, job)
    dist.destroy_process_group()
    leave(folder, f"at.{rank}", "the end")


if __name__ == "__main__":
    place, *numbers = sys.argv[1:]
    if numbers:
        main(Path(place), *map(int, numbers))
    else:
        main_under_torchrun(Path(place))
