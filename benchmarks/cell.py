"""Cell: one workload and one optimizer, with all contestants in heats that fit in memory."""

import gc
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import contestants as who
from benchmarks.cases import CASES, Step
from benchmarks.contestants import Contestants
from benchmarks.errors import Absent
from benchmarks.records import Cell, Heat
from benchmarks.timing import take_turns
from benchmarks.workloads import WORKLOADS, Size, Workload

ANCHORS = (who.FLOOR, who.AUTO)
"""Contestants of every heat, with which the others are compared."""

WARM_STEPS = 3

Tell = Callable[[str], object]


def heats_of(workload: Workload, device: str, *, fused: bool) -> dict[str, tuple[str, ...]]:
    """Return the heats of a cell by name, without the anchors.

    A heat holds contestants that are compared with one another. The heat with torch.compile is the
    last one, because a compiled step does not free what it has captured.
    """
    torch_optim = ("blocked", who.LOOP, who.FOREACH, who.FUSED, who.COMPILED)
    ours = ("compiled", who.GATHERED, who.DOT_GRAD)
    if device != "cpu":
        return {"executors": ("compiled", "fused"), "torch.optim": (*torch_optim[1:], *who.DOORS)}
    heats: dict[str, tuple[str, ...]] = {
        "executors": ours,
        "functional": (who.FUNCTIONAL,),
        "scripted": (who.SCRIPTED,),
        "TorchOpt": (who.TORCHOPT,),
    }
    if workload.large:  # one more contestant would not fit in memory
        heats["front end"] = (who.FRONT_END, who.LOOP, who.FUSED)
        heats.update({name: (name, who.FUSED) for name in (who.IN_PLACE, who.BUCKET)})
    if workload.many and fused:
        heats["gradients"] = (who.FUSED, who.GATHERED, who.PLAIN, who.PLAIN_GATHERED)
    beside = (who.GATHERED,) if workload.large else (who.GATHERED, *who.DOORS)
    return {**heats, "torch.optim": (*torch_optim, *beside)}


def run_cell(
    *,
    workload: str,
    optimizer: str,
    device: str,
    size: Size,
    rounds: int,
    turn_seconds: float,
    threads: int,
    only: Sequence[str],
    tell: Tell,
) -> Cell:
    """Time one cell.

    Args:
        workload: a key of WORKLOADS.
        optimizer: a key of CASES.
        device: "cpu" or "cuda".
        size: the size of the workload.
        rounds: turns of each contestant.
        turn_seconds: length of a turn.
        threads: threads of the floor. The environment sets those of torch.
        only: names of the contestants; empty for all.
        tell: called with lines of progress.
    """
    case = CASES[optimizer]
    group = Contestants(
        WORKLOADS[workload].shapes[size](), size, case, device=device, threads=threads
    )
    cell = Cell(workload, optimizer, device, [])
    wait: Callable[[], Any] = torch.cuda.synchronize if device == "cuda" else lambda: None
    kept: dict[str, Step] = {}
    for heat, others in heats_of(WORKLOADS[workload], device, fused=case.fused).items():
        names = [name for name in (*ANCHORS, *others) if not only or name in only]
        if not any(name in others for name in names):
            continue
        steps = _gather(group, names, kept, cell, heat, tell)
        kept = {name: steps[name] for name in ANCHORS if name in steps}
        if len(steps) > len(kept):
            seconds = take_turns(
                steps,
                rounds=rounds,
                turn_seconds=turn_seconds,
                wait=wait,
                tell=partial(_tell_round, tell, heat, rounds),
            )
            for name in _idle(group, steps):
                cell.failed[name] = "its parameters did not change, or are not finite"
                del seconds[name]
            cell.heats.append(Heat(heat, seconds))
        steps = {}
        group.release(tuple(kept))
        gc.collect()
    return cell


def _tell_round(tell: Tell, heat: str, rounds: int, done: int) -> None:
    tell(f"{heat}: round {done} of {rounds}")


def _gather(
    group: Contestants,
    names: Sequence[str],
    kept: dict[str, Step],
    cell: Cell,
    heat: str,
    tell: Tell,
) -> dict[str, Step]:
    """Return the contestants of a heat that exist, after their first steps."""
    steps: dict[str, Step] = {}
    for name in names:
        tell(f"{heat}: {name}")
        step = kept.get(name) or _built(group, name, cell)
        if step is not None:
            steps[name] = step
    return steps


def _built(group: Contestants, name: str, cell: Cell) -> Step | None:
    """Return a contestant after its first steps. If there is none, record why and return None."""
    if name in cell.absent or name in cell.failed:
        return None
    try:
        step = group.build(name)
        for _ in range(WARM_STEPS):
            step()
    except Absent as reason:
        cell.absent[name] = str(reason)
    except Exception as error:  # noqa: BLE001  one contestant's fault must not end the others' run
        cell.failed[name] = f"{type(error).__name__}: {error}"[:500]
    else:
        return step
    return None


def _idle(group: Contestants, names: Iterable[str]) -> list[str]:
    """Return the contestants that were fast because they did nothing, or computed with NaN."""
    return [name for name in names if not all(map(_moved, group.stepped[name]))]


def _moved(param: Tensor) -> bool:
    low, high = (float(one) for one in torch.aminmax(param.detach()))
    return math.isfinite(low) and math.isfinite(high) and not low == high == who.START
