"""Parts of the section on sharded training: time, peak memory and saving."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import sharded as who
from benchmarks.records import Cell, Heat, Sharded, ShardedPeak, ShardedSaving
from benchmarks.sharded_launch import RankError, run_ranks
from benchmarks.sharded_models import numel
from benchmarks.workloads import Size

Tell = Callable[[str], object]

MEMORY = Path("/proc/meminfo")
PROCESS_BYTES = 350 * 2**20
"""Bytes of a rank without a model."""


def run_sharded(
    *, model: str, ranks: int, size: Size, rounds: int, only: Sequence[str], tell: Tell
) -> Sharded:
    """Time the contestants at one place, heat by heat.

    A contestant that fails or hangs ends the ranks. Its error is recorded, and the heat starts
    again without it.

    Args:
        model: a key of TASKS.
        ranks: the number of ranks.
        size: the size of the model.
        rounds: turns of each contestant.
        only: names of the contestants; empty for all.
        tell: called with lines of progress.
    """
    place = who.Place(model, ranks)
    cell = Cell(str(place), who.RULE, "cpu", [])
    found = Sharded(model, ranks, numel(model, size), who.ITERATIONS[size], cell)
    for heat, others in who.HEATS.items():
        names = [name for name in (*who.ANCHORS, *others) if not only or name in only]
        if heat != next(iter(who.HEATS)) and not any(name in others for name in names):
            continue
        wanted, free = needed_bytes(names, found.parameters, ranks), free_bytes()
        if free is not None and wanted > free:
            why = f"needs {wanted / 2**30:.1f} GiB of memory, {free / 2**30:.1f} GiB are free"
            cell.absent.update({name: f"{heat}: {why}" for name in others if name in names})
            continue
        _heat(found, heat, names, size, rounds, tell)
    return found


def _heat(
    found: Sharded, heat: str, names: Sequence[str], size: Size, rounds: int, tell: Tell
) -> None:
    cell = found.cell
    while True:
        left = [name for name in names if name not in cell.failed]
        if not left:
            return
        given = {"names": left, "rounds": rounds, "iterations": found.iterations}
        try:
            answer = run_ranks(
                "time",
                found.model,
                size,
                found.ranks,
                given,
                limit_seconds=who.LIMIT_SECONDS[size],
                tell=lambda at: tell(f"{heat}: {at}"),
            )[0]
        except RankError as error:
            if error.where not in left:
                raise  # not an error of a contestant
            cell.failed[error.where] = error.why
        else:
            cell.heats.append(Heat(heat, answer["seconds"]))
            found.off.update({name: off[0] for name, off in answer["off"].items()})
            found.sums_off.update({name: off[1] for name, off in answer["off"].items()})
            return


def needed_bytes(names: Sequence[str], parameters: int, ranks: int) -> int:
    """Return about how many bytes a heat takes on all ranks. Each contestant has its own model."""
    # Copies: parameters, gradients, two moments, buckets without views, and buffers of foreach.
    copies = {
        who.DDP_FOREACH: 7.0,
        who.DDP_FUSED: 4.0,
        who.TORCH_ZERO: 3.0 + 2.0 / ranks,
        who.STEP_DEFAULT: 3.0 + 2.0 / ranks,
        who.FSDP: 1.0 + 4.0 / ranks,
    }
    sharded = 2.0 + 2.0 / ranks
    each = sum(copies.get(name, sharded) for name in names)
    return ranks * (PROCESS_BYTES + int(4 * parameters * each))


def free_bytes() -> int | None:
    """Return the bytes of available memory; None if the kernel does not report them."""
    if MEMORY.exists():
        for line in MEMORY.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def run_peak(*, model: str, ranks: int, size: Size, name: str, tell: Tell) -> ShardedPeak:
    """Return the peak resident memory of one contestant in one turn, on the rank with the most."""
    given = {"name": name, "iterations": who.CHECKED_STEPS}
    limit = who.LIMIT_SECONDS[size]
    try:
        found = run_ranks("peak", model, size, ranks, given, limit_seconds=limit, tell=tell)
    except RankError as error:
        return ShardedPeak(model, ranks, name, [], error.why)
    return ShardedPeak(model, ranks, name, [max(found)])


def run_saving(*, model: str, ranks: int, size: Size, rounds: int, tell: Tell) -> ShardedSaving:
    """Time saving, by torch's distributed checkpoint and by ours, in turns."""
    with tempfile.TemporaryDirectory(prefix="saving-") as folder:
        given = {"folder": folder, "rounds": rounds}
        limit = who.SAVING_TIMES * who.LIMIT_SECONDS[size]
        try:
            found = run_ranks("save", model, size, ranks, given, limit_seconds=limit, tell=tell)[0]
        except RankError as error:
            return ShardedSaving(model, ranks, numel(model, size), {}, {}, str(error))
    return ShardedSaving(model, ranks, found["parameters"], found["seconds"], found["bytes"])
