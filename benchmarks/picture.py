"""The report as one picture: five contestants of every cell, as multiples of the floor."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import contestants as who
from benchmarks.cases import CASES
from benchmarks.ratios import ratio
from benchmarks.records import Cell, Report
from benchmarks.workloads import WORKLOADS

MARKS = {
    who.AUTO: ("#0b3d91", "o", "functional-optim, auto"),
    who.FUSED: ("#c1121f", "s", who.FUSED),
    who.FOREACH: ("#f77f00", "D", who.FOREACH),
    who.LOOP: ("#9d4edd", "^", who.LOOP),
    who.COMPILED: ("#1b998b", "v", who.COMPILED),
}
"""Five series, each with its own colour and marker. The tables show all contestants."""

SPREAD = 0.3
"""Vertical distance between the marks of one optimizer, so that no mark hides another."""


def draw(report: Report, path: Path) -> None:
    """Write the picture: one panel per workload.

    Raises:
        ValueError: there is nothing to draw.
    """
    cells = [cell for cell in report.cells if cell.device == "cpu"]
    workloads = [name for name in WORKLOADS if any(cell.workload == name for cell in cells)]
    if not workloads:
        raise ValueError("a picture needs at least one cell timed on the CPU, got none")
    figure = Figure(figsize=(6.4, 2.6 * len(workloads) + 1.2), layout="constrained")
    panels = figure.subplots(len(workloads), 1, squeeze=False)[:, 0]
    for axes, workload in zip(panels, workloads, strict=True):
        _panel(axes, workload, [cell for cell in cells if cell.workload == workload])
    panels[-1].set_xlabel("time of a step, in multiples of one pass of a loop in C (dashed)")
    handles = [
        Axes.plot(panels[0], [], [], mark, color=color, label=label)[0]
        for color, mark, label in MARKS.values()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
    machine = report.machine
    note = "" if report.size == "full" else f", size {report.size!r}"
    figure.suptitle(
        "Time of a step: median, and from least to greatest\n"
        f"{machine['cpu']}, {report.threads} threads, torch {machine['torch']}{note}",
        fontsize=11,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _panel(axes: Axes, workload: str, cells: list[Cell]) -> None:
    names = list(CASES)
    steps = len(MARKS) - 1
    for cell in cells:
        line = names.index(cell.optimizer)
        for place, (name, (color, mark, _)) in enumerate(MARKS.items()):
            found = ratio(cell, name, who.FLOOR)
            if found is not None:
                height = line + SPREAD * (2 * place / steps - 1)
                axes.plot([found.least, found.greatest], [height] * 2, color=color, linewidth=1)
                axes.plot(found.median, height, mark, color=color, markersize=4)
    axes.axvline(1.0, color="black", linestyle="--", linewidth=0.8)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_title(workload, fontsize=10)
    axes.set_ylabel("optimizer")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(axis="x", alpha=0.3)
