"""Checkpoints of many simulated ranks: planned, written and loaded without processes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from sharding import ParameterSpec, ShardPlan, plan
from sharding.checkpoint.flat_ranges import FlatRanges, OnOtherRanks
from sharding.storage import ChecksumReader

FIELDS = ("exp_avg", "exp_avg_sq")


def specs_of(parameters: int, elements: int) -> list[ParameterSpec]:
    return [ParameterSpec(f"layer{number}.weight", (elements,)) for number in range(parameters)]


def part(shares: ShardPlan, rank: int, fill: float | None) -> dict[str, Any]:
    """Return the state of one rank, by name, as ZeRO with this plan has it.

    Args:
        shares: the shard plan.
        rank: the rank in the plan.
        fill: the value of all elements; None for the number of each element.
    """
    states: dict[str, dict[str, Any]] = {spec.path: {} for spec in shares.specs}
    for one in shares.owned(rank):
        shape = shares.specs[one.parameter].shape
        entries: dict[str, Any] = states[one.path]
        for field in FIELDS:
            own = torch.arange(float(one.start), float(one.stop))
            own = own if fill is None else torch.full_like(own, fill)
            ranges = {**entries[field].ranges} if field in entries else {}
            ranges[one.start] = own
            entries[field] = FlatRanges(shape, ranges, own.dtype, "cpu", "simulated")
        entries["step"] = torch.tensor(3.0 if fill is None else fill)
    every = {path: entries or OnOtherRanks("simulated") for path, entries in states.items()}
    groups = [{"lr": 0.1, "params": [*states]}]
    return {"optim": {"state": every, "param_groups": groups}}


def parts_of(world_size: int, specs: Sequence[ParameterSpec], fill: float | None) -> list[Any]:
    shares = plan(specs, world_size, "elements")
    return [part(shares, rank, fill) for rank in range(world_size)]


class RankReader(ChecksumReader):
    """Reader of one of many simulated ranks."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        super().__init__(folder)
        self._simulated = rank, size

    def _rank_and_size(self) -> tuple[int, int]:
        return self._simulated


def load_parts(parts: Sequence[dict[str, Any]], folder: Path) -> None:
    """Load on all ranks, as ``dcp.load`` does on the same number of processes."""
    made = []
    for rank, state in enumerate(parts):
        reader, planner = RankReader(folder, rank, len(parts)), DefaultLoadPlanner()
        metadata = reader.read_metadata()
        planner.set_up_planner(state, metadata, rank == 0)
        reader.set_up_storage_reader(metadata, rank == 0, rank=rank, use_collectives=True)
        made.append((reader, planner, reader.prepare_local_plan(planner.create_local_plan())))
    final = made[0][1].create_global_plan([one[2] for one in made])
    final = made[0][0].prepare_global_plan(final)
    for (reader, planner, _), local in zip(made, final, strict=True):
        reader.read_data(planner.finish_plan(local), planner)


def check_numbers(parts: Sequence[dict[str, Any]]) -> None:
    """Check that the value of each element is its number."""
    for one in parts:
        for entries in one["optim"]["state"].values():
            for field in FIELDS if entries else ():
                for start, value in entries[field].current.items():
                    assert torch.equal(value, torch.arange(float(start), start + value.numel()))
