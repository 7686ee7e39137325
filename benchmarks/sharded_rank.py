"""Rank of sharded training: it runs the order on standard input, and reports the results.

The rank answers with lines of JSON: ``{"at": ...}`` for each contestant, then ``{"result": ...}``
or ``{"failed": ..., "at": ...}``. It ends when its standard input ends.
"""

import json
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW

from benchmarks import sharded as who
from benchmarks.sharded_models import TASKS, Task
from benchmarks.sharded_peers import Contestant
from benchmarks.timing import LONG_SECONDS, quiet

STATUS = Path("/proc/self/status")

ANSWERS = os.fdopen(os.dup(1), "w")

UNSHARDED = "the unsharded model"


class Here:
    """Current contestant of this rank. If the rank fails or hangs, the launcher names it."""

    def __init__(self) -> None:
        self.name = who.START

    def go(self, name: str) -> None:
        """Report that a contestant begins."""
        self.name = name
        say(at=name)


HERE = Here()


def say(**line: Any) -> None:
    """Send a line to the launcher."""
    ANSWERS.write(json.dumps(line) + "\n")
    ANSWERS.flush()


def build(name: str, task: Task) -> Contestant:
    """Build a contestant by its name. Load no other contestant's modules: they would use memory."""
    module = "sharded_peers" if name in who.PEERS else "sharded_ours"
    found: Contestant = import_module(f"benchmarks.{module}").BUILDERS[name](task)
    return found


def slowest(value: float) -> float:
    """Return the largest of all ranks' values; infinite if one is NaN."""
    found = torch.tensor([math.inf if math.isnan(value) else value], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


# ------------------------------------------------------------------------------ the right result


class Unsharded(NamedTuple):
    """Result of one AdamW on all ranks' batches together, after some steps."""

    params: list[Tensor]
    total: float
    """The sum of all parameters."""
    way: float
    """The 2-norm of the distance that the parameters have moved."""
    way_1: float
    """The 1-norm of this distance."""


class Off(NamedTuple):
    """Distance of a contestant from the unsharded result, divided by the unsharded movement."""

    distance: float
    total: float


@torch.no_grad()
def _norm(one: Sequence[Tensor], other: Sequence[Tensor], p: int) -> float:
    """Return the norm of the difference, in double precision."""
    sums = [(a.double() - b.double()).abs_().pow_(p).sum() for a, b in zip(one, other, strict=True)]
    total = float(sum(sums))
    return math.sqrt(total) if p == 2 else total


@torch.no_grad()
def _total(params: Sequence[Tensor]) -> float:
    return float(sum(param.double().sum() for param in params))


def unsharded(task: Task, ranks: int, steps: int) -> Unsharded:
    """Train one AdamW on the batches of all ranks, without DDP."""
    batches = [task.batch(rank) for rank in range(ranks)]
    batch = (torch.cat([one[0] for one in batches]), torch.cat([one[1] for one in batches]))
    model = task.model()
    params = [param.detach() for param in model.parameters()]
    start = [param.clone() for param in params]
    optimizer = AdamW(model.parameters(), **who.OPTIONS)
    for _ in range(steps):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
    return Unsharded(params, _total(params), _norm(params, start, 2), _norm(params, start, 1))


def checked(contestant: Contestant, right: Unsharded) -> Off:
    """Return the distance of a contestant, from the rank where it is greatest.

    Raises:
        RuntimeError: the distance exceeds the tolerance.
    """
    params = [param.detach() for param in contestant.params()]
    distance = slowest(_norm(params, right.params, 2) / right.way)
    total = slowest(abs(_total(params) - right.total) / right.way_1)
    if distance > who.TOLERANCE or total > who.SUM_TOLERANCE:
        raise RuntimeError(
            f"after {who.CHECKED_STEPS} steps its parameters are off those of the unsharded AdamW "
            f"by {distance:.2g} of how far those moved, allowed is {who.TOLERANCE:g}; their sum by "
            f"{total:.2g}, allowed is {who.SUM_TOLERANCE:g}"
        )
    return Off(distance, total)


# ----------------------------------------------------------------------------------------- time


def timed(
    task: Task, ranks: int, *, names: Sequence[str], rounds: int, iterations: int
) -> dict[str, Any]:
    """Check the result of each contestant, then time all contestants in turns."""
    HERE.go(UNSHARDED)
    right: Unsharded | None = unsharded(task, ranks, who.CHECKED_STEPS)
    assert right is not None
    contestants: dict[str, Contestant] = {}
    off: dict[str, Off] = {}
    for name in names:
        HERE.go(name)
        made = contestants[name] = build(name, task)
        for _ in range(who.CHECKED_STEPS):
            made.iterate()
        off[name] = checked(made, right)
    right = None  # frees its memory
    with quiet():
        seconds = in_turns(contestants, rounds, iterations)
    return {"seconds": seconds, "off": off}


def in_turns(
    contestants: Mapping[str, Contestant], rounds: int, iterations: int
) -> dict[str, list[float]]:
    """Return the seconds per iteration of each contestant on its slowest rank.

    Each round begins with another contestant. All ranks get the same figures, so that all make the
    same decisions.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            HERE.go(name)
            one, taken = contestants[name], seconds[name]
            if not taken or taken[-1] < LONG_SECONDS:
                one.iterate()  # brings the contestant's data into the caches
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(iterations):
                one.iterate()
            taken.append(slowest((time.perf_counter() - begin) / iterations))
    return seconds


# --------------------------------------------------------------------------------------- memory


def peak(task: Task, ranks: int, *, name: str, iterations: int) -> int:
    """Return the peak of resident bytes, in a process that did nothing else."""
    del ranks
    HERE.go(name)
    contestant = build(name, task)
    for _ in range(iterations):
        contestant.iterate()
    for line in STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{STATUS} has no VmHWM")


# --------------------------------------------------------------------------------------- saving

Save = Callable[[Path], None]
SAVED_BYTES = 8
"""Bytes for each parameter: two moments in float32."""


def _gradients(params: Sequence[Tensor]) -> None:
    for param in params:
        param.grad = torch.full_like(param, 1e-3)


def _dcp_save(task: Task) -> Save:
    model, optimizer = import_module("benchmarks.sharded_peers").fully_sharded(task)
    dcp = import_module("torch.distributed.checkpoint")
    state_of = import_module("torch.distributed.checkpoint.state_dict").get_optimizer_state_dict
    _gradients(list(model.parameters()))
    optimizer.step()
    optimizer.zero_grad()

    def save(folder: Path) -> None:
        dcp.save(
            {"optimizer": state_of(model, optimizer)}, storage_writer=dcp.FileSystemWriter(folder)
        )

    return save


def _our_save(task: Task) -> Save:
    model = task.model()
    optimizer = import_module("benchmarks.sharded_ours").zero(
        model.named_parameters(), "elements", fused=True
    )
    _gradients(list(model.parameters()))
    optimizer.step()
    optimizer.zero_grad()
    dcp = import_module("torch.distributed.checkpoint")
    state_of = import_module("torch.distributed.checkpoint.state_dict").get_optimizer_state_dict
    writer = import_module("sharding.storage").ChecksumWriter

    def save(folder: Path) -> None:
        dcp.save({"optimizer": state_of(model, optimizer)}, storage_writer=writer(folder))

    return save


SAVERS = {who.DCP: _dcp_save, who.SAVE: _our_save}


def saved(task: Task, ranks: int, *, folder: str, rounds: int) -> dict[str, Any]:
    """Save the state by each way in turns. Return the slowest rank's seconds, and the bytes."""
    del ranks
    savers: dict[str, Save] = {}
    for name, make in SAVERS.items():
        HERE.go(name)
        savers[name] = make(task)
    seconds: dict[str, list[float]] = {name: [] for name in savers}
    written: dict[str, int] = {}
    names = list(savers)
    for number in range(rounds):
        for name in names if number % 2 == 0 else names[::-1]:
            HERE.go(name)
            place = Path(folder) / f"{names.index(name)}-{number}"
            taken, written[name] = _one_save(savers[name], place)
            seconds[name].append(taken)
    numel = sum(param.numel() for param in task.model().parameters())
    for name, count in written.items():
        if count < SAVED_BYTES * numel:
            HERE.go(name)
            raise RuntimeError(f"it wrote {count} bytes for {numel} parameters")
    return {"seconds": seconds, "bytes": written, "parameters": numel}


def _one_save(save: Save, place: Path) -> tuple[float, int]:
    first = dist.get_rank() == 0
    if first:
        place.mkdir(parents=True)
        os.sync()  # flushes the writes of earlier savers
    dist.barrier()
    begin = time.perf_counter()
    save(place)
    if first:
        _sync(place)
    taken = slowest(time.perf_counter() - begin)
    written = sum(one.stat().st_size for one in place.rglob("*") if one.is_file())
    dist.barrier()
    if first:
        shutil.rmtree(place)
    return taken, written


def _sync(folder: Path) -> None:
    """Sync all files of a folder to the disk. A saver that syncs itself leaves nothing to do."""
    for one in (folder, *folder.rglob("*")):
        place = os.open(one, os.O_RDONLY)
        try:
            os.fsync(place)
        finally:
            os.close(place)


# -------------------------------------------------------------------------------------- the rank


def sent(task: Task, ranks: int, *, names: Sequence[str]) -> list[int]:
    """Return the bytes that this rank sends, for each way of averaging."""
    found: list[int] = import_module("benchmarks.averaging_sent").sent(
        task, ranks, HERE.go, names=names
    )
    return found


def race(task: Task, ranks: int, **given: Any) -> Any:
    """Train for some time, in each way of averaging."""
    return import_module("benchmarks.averaging_race").race(task, ranks, HERE.go, **given)


JOBS: dict[str, Callable[..., Any]] = {
    "time": timed,
    "peak": peak,
    "save": saved,
    "sent": sent,
    "race": race,
}


def _end_with_the_launcher() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


def main() -> None:
    """Run the order."""
    order = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_the_launcher, daemon=True).start()
    torch.set_num_threads(1)  # OMP_NUM_THREADS does not reach all pools
    try:
        store = dist.FileStore(order["store"], order["ranks"])
        dist.init_process_group(
            "gloo",
            store=store,
            rank=order["rank"],
            world_size=order["ranks"],
            timeout=timedelta(seconds=order["group_seconds"]),
        )
        task = TASKS[order["model"]][order["size"]]
        found = JOBS[order["job"]](task, order["ranks"], **order["given"])
    except Exception as error:  # noqa: BLE001  the launcher decides what to make of it
        say(failed=f"{type(error).__name__}: {error}"[:1000], at=HERE.name)
    else:
        say(result=found)
    # Connections stay open, because other ranks may still need them. The launcher ends all ranks.
    threading.Event().wait()


if __name__ == "__main__":
    os.dup2(2, 1)  # libraries must not print between the answers
    main()
