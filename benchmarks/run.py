"""A whole run: the parts of the plan one after the other, and the report of their results."""

import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from benchmarks import contestants as who
from benchmarks.plan import Part, Settings, parts
from benchmarks.process import PartError, run_part
from benchmarks.records import (
    AveragingRace,
    AveragingSent,
    Balance,
    Cell,
    Convergence,
    Memory,
    Ready,
    Remote,
    Report,
    ShardedPeak,
    ShardedSaving,
    Threads,
    cell_from,
    sharded_from,
)

Tell = Callable[[str], object]
Show = Callable[[int, int, str], object]
Keep = Callable[[Report], object]


def run(settings: Settings, show: Show, keep: Keep = lambda _: None) -> Report:
    """Run all parts, and return the report.

    Args:
        settings: the settings of the run.
        show: called with the number of finished parts, the number of parts, and the progress.
        keep: called with the results so far, after each part.

    Raises:
        PartError: the description of the machine failed.
    """
    show(0, 1, "looking at the machine")
    machine = run_part("machine", {}, threads=settings.threads)
    skips = {"gpu": machine.pop("no_gpu"), "memory": machine.pop("no_memory")}
    today = datetime.now(UTC).date().isoformat()
    report = Report(machine, settings.size, settings.rounds, settings.threads)
    with tempfile.TemporaryDirectory() as scratch:
        plan = list(parts(settings, scratch))
        chosen = settings.sections
        report.skipped.update({one: why for one, why in skips.items() if why and one in chosen})
        plan = [part for part in plan if part.section not in report.skipped]
        report.dates.update({part.section: [today] for part in plan})
        for number, part in enumerate(plan):
            show(number, len(plan), part.name)
            _one(report, part, _teller(show, number, len(plan), part.name))
            keep(report)
    show(len(plan), len(plan), "done")
    return report


def _teller(show: Show, number: int, count: int, name: str) -> Tell:
    return lambda what: show(number, count, f"{name}: {what}")


def _one(report: Report, part: Part, tell: Tell) -> None:
    """Run one part, and put its result or its error into the report."""
    try:
        found = run_part(
            part.kind,
            part.given,
            threads=part.threads,
            tell=tell,
            environment=part.environment,
            limit_seconds=part.limit_seconds,
        )
    except PartError as error:
        report.failed[part.name] = str(error)
        if part.kind == "cell":
            given = part.given
            failed = dict.fromkeys(given["only"] or who.NAMES, "the whole process failed")
            cell = Cell(given["workload"], given["optimizer"], given["device"], [], {}, failed)
            report.cells.append(cell)
        return
    _ADD[part.kind](report, part, found)


def _add_cell(report: Report, part: Part, found: Any) -> None:
    report.cells.append(cell_from(found))


def _add_memory(report: Report, part: Part, found: Any) -> None:
    report.memory.extend(Memory(**one) for one in found)


def _add_threads(report: Report, part: Part, found: Any) -> None:
    report.two_threads.append(Threads(**found))


def _add_ready(report: Report, part: Part, found: float) -> None:
    """Add the time of a way. The first process of a way is the cold one."""
    way = part.given["way"]
    known = [one for one in report.ready if one.way == way]
    if known:
        known[0].warm.append(found)
    elif not any(name.startswith(f"ready: {way},") for name in report.failed):
        report.ready.append(Ready(way, found, []))


def _add_convergence(report: Report, part: Part, found: Any) -> None:
    report.convergence.append(Convergence(**found))


def _add_sharded(report: Report, part: Part, found: Any) -> None:
    report.sharded.append(sharded_from(found))


def _add_peak(report: Report, part: Part, found: Any) -> None:
    """Add a turn of a contestant. A contestant that has failed once has no figure."""
    peak = ShardedPeak(**found)
    for at, one in enumerate(report.sharded_peaks):
        if (one.model, one.ranks, one.way) == (peak.model, peak.ranks, peak.way):
            if peak.failed:
                report.sharded_peaks[at] = peak
            elif not one.failed:
                one.peaks.extend(peak.peaks)
            return
    report.sharded_peaks.append(peak)


def _add_saving(report: Report, part: Part, found: Any) -> None:
    report.sharded_saving.append(ShardedSaving(**found))


def _add_balance(report: Report, part: Part, found: Any) -> None:
    report.balance.extend(Balance(**one) for one in found)


def _add_averaging_sent(report: Report, part: Part, found: Any) -> None:
    if "skipped" in found:
        report.skipped[part.name] = found["skipped"]
    report.averaging_sent.extend(AveragingSent(**one) for one in found.get("sent", []))


def _add_averaging_races(report: Report, part: Part, found: Any) -> None:
    if "skipped" in found:
        report.skipped[part.name] = found["skipped"]
    report.averaging_races.extend(AveragingRace(**one) for one in found.get("races", []))


def _add_remote(report: Report, part: Part, found: Any) -> None:
    report.remote.extend(Remote(**one) for one in found)


_ADD = {
    "cell": _add_cell,
    "memory": _add_memory,
    "threads": _add_threads,
    "ready": _add_ready,
    "convergence": _add_convergence,
    "sharded": _add_sharded,
    "sharded peak": _add_peak,
    "sharded saving": _add_saving,
    "balance": _add_balance,
    "averaging sent": _add_averaging_sent,
    "averaging races": _add_averaging_races,
    "remote": _add_remote,
}
