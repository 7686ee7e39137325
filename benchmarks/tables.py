"""The report as Markdown: its summary, and the whole page."""

from collections.abc import Callable, Iterator
from statistics import median

from benchmarks import contestants as who
from benchmarks import convergence, memory, ready
from benchmarks.averaging_tables import averaging_sections
from benchmarks.cases import CASES
from benchmarks.checks import Check
from benchmarks.distances import SPREADS, TOLERANCE, allowed, distance, float32_spread
from benchmarks.markdown import DASH, table
from benchmarks.ratios import against_best, ratio, short, spread
from benchmarks.records import Cell, Convergence, Memory, Report, Threads
from benchmarks.remote_tables import remote_failures, remote_sections
from benchmarks.sharded_tables import as_constructed, sharded_failures, sharded_sections
from benchmarks.targets import learning, shown_extra, targets
from benchmarks.workloads import WORKLOADS


def summary(report: Report) -> str:
    """Return the ratios to read first, and the table of targets."""
    parts = [
        _conditions(report),
        "`auto` is `optimizer.bind(params).step`, with parameters and gradients in flat buffers. "
        "Against the floor, one pass of a loop in C:\n\n" + _matrix(report, _floor_cell),
        "`auto` against the fastest of all peers:\n\n" + _matrix(report, _peer_cell(who.AUTO)),
        "`TorchOptimizer`, as constructed, against the fastest of all peers:\n\n"
        + _matrix(report, _peer_cell(who.FRONT_END)),
        *as_constructed(report),
        _target_table(report),
    ]
    return "\n".join(parts)


def details(report: Report, pictures: str = "") -> str:
    """Return everything that was measured, as one page.

    Args:
        report: of one run.
        pictures: Markdown to put after the summary.
    """
    parts = [
        "# Benchmarks\n",
        "Made by `make bench ARGS=--write`; do not edit.\n",
        summary(report),
        *([pictures] if pictures else []),
        *_failures(report),
        *_workloads(report, "cpu"),
        *_workloads(report, "cuda"),
        *_memory(report),
        *_threads(report),
        *_ready(report),
        *_convergence(report),
        *sharded_sections(report),
        *averaging_sections(report),
        *remote_sections(report),
        *(f"Skipped: {what}: {why}.\n" for what, why in report.skipped.items()),
    ]
    return "\n".join(parts)


def _conditions(report: Report) -> str:
    machine = report.machine
    small = "" if report.size == "full" else f"**Size {report.size!r}: for a first look only.** "
    return (
        f"{small}{machine['cpu']}, {report.threads} threads, torch {machine['torch']}, "
        f"Python {machine['python']}, float32; {_days(report)}. Every figure is a ratio of "
        f"times taken in turns in one process: the median of {report.rounds} or more rounds, and "
        "in parentheses the least and the greatest; less than 1 is faster.\n"
    )


def _days(report: Report) -> str:
    """Return the days of the measurements, the latest first, with the sections of each day."""
    sections: dict[str, list[str]] = {}
    for section, days in report.dates.items():
        sections.setdefault(" and ".join(days), []).append(section)
    return "; ".join(f"{', '.join(sections[days])} of {days}" for days in sorted(sections)[::-1])


def _floor_cell(cell: Cell) -> str:
    found = ratio(cell, who.AUTO, who.FLOOR)
    return DASH if found is None else str(found)


def _peer_cell(name: str) -> Callable[[Cell], str]:
    def shown(cell: Cell) -> str:
        found = against_best(cell, name)
        return DASH if found is None else f"{found.ratio} {found.peer.removeprefix('torch ')}"

    return shown


def _matrix(report: Report, show: Callable[[Cell], str]) -> str:
    """Return a table of optimizers by workloads."""
    cells = {(one.optimizer, one.workload): one for one in report.cells if one.device == "cpu"}
    workloads = [name for name in WORKLOADS if any(name == key[1] for key in cells)]
    rows = [
        [name, *(show(cells[name, w]) if (name, w) in cells else DASH for w in workloads)]
        for name in CASES
        if any(name == key[0] for key in cells)
    ]
    return table(["", *workloads], rows)


def _target_table(report: Report) -> str:
    rows = []
    for one in targets(report):
        worst, every = one.worst, len(one.checks) + len(one.missing)
        kept = sum(check.met for check in one.checks)
        shown = DASH if worst is None else f"{worst.shown} at {worst.where}"
        shown += f"; not measured: {', '.join(one.missing)}" if one.missing else ""
        rows.append([one.promise, one.verdict, f"{kept} of {every}", shown])
    return table(["target", "", "figures", "closest to the limit, or furthest beyond"], rows)


def _failures(report: Report) -> Iterator[str]:
    failed = dict(report.failed)
    for cell in report.cells:
        for name, why in cell.failed.items():
            failed[f"{cell.optimizer}, {cell.workload}, {cell.device}: {name}"] = why
    for one in report.memory:
        if one.failed:
            failed[f"memory, {one.optimizer}, {one.workload}: {one.way}"] = one.failed
    failed.update(sharded_failures(report))
    failed.update(remote_failures(report))
    if failed:
        lines = [f"- {what}: {' '.join(why.split())}\n" for what, why in failed.items()]
        yield "## Failed\n"
        yield "".join(lines)


def _workloads(report: Report, device: str) -> Iterator[str]:
    for workload in WORKLOADS:
        cells = [c for c in report.cells if (c.workload, c.device) == (workload, device)]
        if not cells:
            continue
        floor = "the loop in C" if device == "cpu" else "a copy that moves as many bytes"
        yield f"## {workload}{'' if device == 'cpu' else f' on {device}'}\n"
        yield f"Times {floor}.\n"
        names = [n for n in who.NAMES if any(ratio(cell, n, who.FLOOR) for cell in cells)]
        shown = [[str(ratio(cell, name, who.FLOOR) or DASH) for cell in cells] for name in names]
        rows = [[name, *row] for name, row in zip(names, shown, strict=True) if name != who.FLOOR]
        microseconds = [short(1e6 * _seconds(cell, who.FLOOR)) for cell in cells]
        rows.insert(0, ["the floor itself, in microseconds", *microseconds])
        yield table(["", *(cell.optimizer for cell in cells)], rows)
        reasons = {why for cell in cells for why in cell.absent.values()}
        yield "".join(f"- not there: {why}\n" for why in sorted(reasons))


def _seconds(cell: Cell, name: str) -> float:
    taken = [one for heat in cell.heats for one in heat.seconds.get(name, [])]
    return median(taken) if taken else float("nan")


def _memory(report: Report) -> Iterator[str]:
    if not report.memory:
        return
    yield "## Memory that one step needs on top\n"
    yield "Peak of resident memory during a third step, above what was resident before it.\n"
    workloads = list(dict.fromkeys(one.workload for one in report.memory))
    found: dict[tuple[str, str], dict[str, Memory]] = {}
    for one in report.memory:
        found.setdefault((one.optimizer, one.way), {})[one.workload] = one
    rows = [
        [
            f"{optimizer}, {'' if way in (*memory.PEERS, memory.BOUND) else 'update_ with '}{way}",
            *(shown_extra(by[name]) if name in by else DASH for name in workloads),
        ]
        for (optimizer, way), by in found.items()
    ]
    yield table(["", *workloads], rows)


def _threads(report: Report) -> Iterator[str]:
    if not report.two_threads:
        return
    yield "## Two threads, two models\n"
    yield (
        "AdamW, one thread inside each step: speed-up over one model after the other; and what a "
        "thread of Python, which has nothing to do with the steps of the model beside it, keeps of "
        "its speed.\n"
    )
    rows = [
        [one.way, str(spread(one.one_after_other, one.together)), _kept(one)]
        for one in report.two_threads
    ]
    yield table(["", "speed-up", "a thread of Python keeps"], rows)


def _kept(one: Threads) -> str:
    return str(spread(one.alone, one.beside)) if one.beside else DASH


def _ready(report: Report) -> Iterator[str]:
    if not report.ready:
        return
    peers = {one.way: one for one in report.ready}
    yield "## Until the first compiled step is done\n"
    yield "AdamW on 10 small parameters, in a process of its own.\n"
    other = peers.get(ready.WAYS[1])
    rows = []
    for one in report.ready:
        warm = median(one.warm or [float("nan")])
        against = DASH if other is None else short(warm / median(other.warm or [float("nan")]))
        rows.append([one.way, f"{one.cold:.2f} s", f"{warm:.3f} s", against])
    head = ["", "empty caches", "second process", "second process / torch compiled"]
    yield table(head, rows)


def _convergence(report: Report) -> Iterator[str]:
    if not report.convergence:
        return
    some = report.convergence[0]
    yield "## Training in every storage\n"
    yield (
        f"{convergence.RULE} on the demo's transformer ({some.parameters:,} parameters) and text, "
        f"{some.steps} steps at a learning rate of at most {some.rate:g}; but for the other seed, "
        "the same first weights and batches for all. "
        "Bytes are those of parameters, gradients and state; the loss is that of validation, in "
        f"nats per character, {some.start:.3f} before the first step. {_allowance(report)} "
        "Rounding to nearest is there as a warning, not as a choice: updates below 2^-9 of a "
        "parameter are lost. The time is that of the optimizer's step alone, gradients in flat "
        "buffers, against float32's.\n"
    )
    head = ["", "bytes per parameter", "loss", "minus float32's", "", "step / float32's"]
    yield table(head, [_convergence_row(report, one) for one in report.convergence])
    yield "".join(
        f"- {one.name}: {'; '.join(one.ran.splitlines())}\n" for one in report.convergence
    )


def _allowance(report: Report) -> str:
    changed, limit = float32_spread(report), allowed(report)
    if changed is None or limit is None:
        return "float32 was not trained from both seeds, so that nothing can be judged."
    return (
        f"float32's loss changes by {changed:.3f} with the seed: allowed is {TOLERANCE:g} + "
        f"{SPREADS:g} x {changed:.3f} = {limit:.3f} from float32's."
    )


def _convergence_row(report: Report, one: Convergence) -> list[str]:
    away = distance(report, one.name)
    kept = {check.where: check.met for check in learning(report) if isinstance(check, Check)}
    verdict = "not judged"
    if one.name in convergence.JUDGED:
        verdict = "met" if kept.get(convergence.TITLE + one.name) else "**MISSED**"
    timed = one.name != convergence.FLOAT32 and one.name in one.seconds
    times = one.seconds
    return [
        one.name,
        f"{one.bytes_per_parameter:.2f}",
        f"{one.loss:.3f}",
        DASH if away is None or one.name == convergence.FLOAT32 else f"{away:+.3f}",
        verdict,
        str(spread(times[one.name], times[convergence.FLOAT32])) if timed else DASH,
    ]
