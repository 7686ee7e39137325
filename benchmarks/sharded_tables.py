"""Results of sharded training, as Markdown."""

from collections.abc import Iterator
from statistics import median

from benchmarks import sharded as who
from benchmarks.markdown import DASH, table
from benchmarks.ratios import ratio, short, spread
from benchmarks.records import Report, Sharded
from benchmarks.sharded_balance import POLICIES


def sharded_failures(report: Report) -> dict[str, str]:
    """Return the reasons why contestants and parts were not measured, by name."""
    failed: dict[str, str] = {}
    for one in report.sharded:
        for name, why in one.cell.failed.items():
            failed[f"sharded, {one.cell.workload}: {name}"] = why
    for peak in report.sharded_peaks:
        if peak.failed:
            place = who.Place(peak.model, peak.ranks)
            failed[f"sharded memory, {place}: {peak.way}"] = peak.failed
    for saving in report.sharded_saving:
        if saving.failed:
            failed[f"sharded saving, {who.Place(saving.model, saving.ranks)}"] = saving.failed
    return failed


def sharded_sections(report: Report) -> Iterator[str]:
    """Yield a section for each measurement."""
    yield from _times(report)
    yield from _peaks(report)
    yield from _saving(report)
    yield from _balance(report)


def _times(report: Report) -> Iterator[str]:
    if not report.sharded:
        return
    yield "## Sharded training: time per iteration\n"
    yield (
        "AdamW over gloo, each rank a process with one thread, all on one machine: torch's ranks "
        "exchange through its loopback interface, ours through memory that they share. Every "
        "contestant has a model of its own in the same processes, and they take turns; the time is "
        "that of the slowest rank. "
        f"After {who.CHECKED_STEPS} steps, parameters were compared with those of one unsharded "
        "AdamW on all ranks' data: farther off than "
        f"{who.TOLERANCE:g} of the way that those had moved (2-norm), or with a sum farther off "
        f"than {who.SUM_TOLERANCE:g} of that way (1-norm), a contestant has failed.\n"
    )
    for unit in (who.UNIT, who.DDP_FUSED, who.TORCH_BEST):
        yield f"Times {unit}:\n"
        rows = [
            [name, *(_against(one, name, unit) for one in report.sharded)]
            for name in who.NAMES
            if name != unit
        ]
        seconds = [_milliseconds(one, unit) for one in report.sharded]
        yield table(
            ["", *(one.cell.workload for one in report.sharded)],
            [[f"{unit} itself, in milliseconds", *seconds], *rows],
        )
    farthest = [one for each in report.sharded for one in each.off.values()]
    sums = [one for each in report.sharded for one in each.sums_off.values()]
    if farthest:
        yield (
            f"The farthest off was a contestant by {max(farthest):.1e} of the way, its sum by "
            f"{max(sums):.1e}.\n"
        )
    yield "".join(
        f"- not there: {one.cell.workload}, {name}: {why}\n"
        for one in report.sharded
        for name, why in one.cell.absent.items()
    )


AS_CONSTRUCTED = (
    (who.STEP_DEFAULT, who.TORCH_ZERO),
    (who.STEP_DEFAULT, who.TORCH_BEST),
    (who.TORCH_ZERO, who.TORCH_BEST),
    (who.JUDGED, who.TORCH_BEST),
)
"""Pairs of contestants to compare: without options, and with the fastest options."""


def as_constructed(report: Report) -> Iterator[str]:
    """Yield a comparison of ours and torch's ZeRO without options, and with the fastest options."""
    if not report.sharded:
        return
    rows = [
        [f"{ours} / {theirs}", *(_against(one, ours, theirs) for one in report.sharded)]
        for ours, theirs in AS_CONSTRUCTED
    ]
    yield (
        f"Sharded AdamW, time of an iteration: `{who.STEP_DEFAULT}` and `{who.TORCH_ZERO}` are "
        "the two `ZeroRedundancyOptimizer` with no option but AdamW's, in DDP without one:\n\n"
        + table(["", *(one.cell.workload for one in report.sharded)], rows)
    )


def _against(one: Sharded, name: str, unit: str) -> str:
    if name in one.cell.failed:
        return "failed"
    return str(ratio(one.cell, name, unit) or DASH)


def _milliseconds(one: Sharded, name: str) -> str:
    taken = [value for heat in one.cell.heats for value in heat.seconds.get(name, [])]
    return short(1e3 * median(taken)) if taken else DASH


def _peaks(report: Report) -> Iterator[str]:
    if not report.sharded_peaks:
        return
    best = next((one.peaks for one in report.sharded_peaks if one.way == who.TORCH_BEST), [])
    yield "## Sharded training: peak memory of a rank\n"
    some = report.sharded_peaks[0]
    yield (
        f"{who.Place(some.model, some.ranks)}, {who.CHECKED_STEPS} iterations in processes that do "
        "nothing else, in turns: what was resident at most, from the start of the process, on the "
        "rank that had the most.\n"
    )
    rows = []
    for one in report.sharded_peaks:
        share = str(spread(one.peaks, best)) if len(one.peaks) == len(best) > 0 else DASH
        shown = f"{median(one.peaks) / 2**20:,.0f}" if one.peaks else "failed"
        rows.append([one.way, shown, share])
    yield table(["", "MiB", "/ torch ZeRO's best"], rows)


def _saving(report: Report) -> Iterator[str]:
    for one in report.sharded_saving:
        yield "## Sharded training: saving the state\n"
        if one.failed:
            yield "It failed.\n"
            continue
        yield (
            f"AdamW's state of {one.parameters:,} parameters on {one.ranks} ranks, onto the same "
            "disk, in turns, until all files are synced: `torch.distributed.checkpoint.save` of "
            "the state of FSDP2, against `save`.\n"
        )
        theirs = one.seconds.get(who.DCP)
        if theirs is None:
            yield "Not measured beside that yet.\n"
            continue
        rows = [
            [
                who.DCP if name == who.DCP else "`save`",
                f"{median(taken):.2f}",
                f"{one.written_bytes[name] / 2**20:,.0f}",
                str(spread(theirs, taken)),
            ]
            for name, taken in one.seconds.items()
        ]
        yield table(["", "seconds", "MiB on the disk", f"times as fast as {who.DCP}"], rows)


def _decimals(value: float) -> str:
    """Return a value with more decimals if it is near 1."""
    return f"{value:.5f}" if value < 1.01 else short(value)


def _balance(report: Report) -> Iterator[str]:
    if not report.balance:
        return
    yield "## Sharded training: balance\n"
    yield (
        "Bytes of parameters, gradients and AdamW's state: the largest rank over the mean. "
        f"`{POLICIES[0]}` is the partition that torch's class makes.\n"
    )
    rows = [
        [f"{one.model}, {one.ranks} ranks", *map(_decimals, map(one.over_mean, POLICIES))]
        for one in report.balance
    ]
    yield table(["", *POLICIES], rows)
