"""Checkpoints of ZeRO through torch.distributed.checkpoint, on processes and on threads.

torch's collectives do not work on the groups of a LocalWorld. On threads, one rank makes the calls
that torch makes on all ranks, in torch's order.
"""

from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from sharding.storage import ChecksumReader, ChecksumWriter
from sharding.transport.groups import device_of
from sharding.transport.local_group import LocalGroup
from sharding.zero.collective import run_on_all_ranks

_PARTS: dict[str, dict[int, Any]] = {}
"""State that threads save, by folder and rank."""

_LOADING = Lock()
"""Lock for loads, since torch sets a mode of the whole process during a partial load."""


def save(zero: Any, folder: Path | str) -> None:
    """Save the state of a ZeroRedundancyOptimizer. Collective."""
    zero._collected = None  # a step does the same: each rank has its part again
    group = zero.process_group
    if not isinstance(group, LocalGroup):
        dcp.save({"optim": zero}, storage_writer=ChecksumWriter(folder), process_group=group)
        return
    parts = _PARTS.setdefault(str(folder), {})
    device, rank = device_of(group), group.rank()
    run_on_all_ranks(
        group, device, "show", lambda: parts.update({rank: {"optim": zero.state_dict()}})
    )

    def write() -> None:
        if rank == 0:
            write_parts([parts[k] for k in sorted(parts)], folder)

    run_on_all_ranks(group, device, "write", write)
    _PARTS.pop(str(folder), None)


def load(zero: Any, folder: Path | str, *, partial: bool = False) -> None:
    """Load a saved state. Collective over processes; on threads, each rank loads alone."""
    zero._collected = None
    state = {"optim": zero.state_dict()}
    group = zero.process_group
    planner = DefaultLoadPlanner(allow_partial_load=partial)
    if isinstance(group, LocalGroup):
        with _LOADING:
            _load_state_dict(state, ChecksumReader(folder), no_dist=True, planner=planner)
    else:
        reader = ChecksumReader(folder, group)
        dcp.load(state, storage_reader=reader, process_group=group, planner=planner)
    zero.load_state_dict(state["optim"])


def write_parts(
    parts: Sequence[dict[str, Any]], folder: Path | str, writers: Sequence[Any] = ()
) -> None:
    """Write the state dicts of all ranks, as ``dcp.save`` does on the same number of processes."""
    writers = writers or [ChecksumWriter(folder) for _ in parts]
    planners = [DefaultSavePlanner() for _ in parts]
    plans = []
    for rank, (planner, writer, part) in enumerate(zip(planners, writers, parts, strict=True)):
        planner.set_up_planner(part, writer.storage_meta(), rank == 0)
        writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
    made, metadata = planners[0].create_global_plan(plans)
    made = writers[0].prepare_global_plan(made)
    results = [
        writer.write_data(planner.finish_plan(plan), planner).value()
        for writer, planner, plan in zip(writers, planners, made, strict=True)
    ]
    writers[0].finish(metadata, results)
