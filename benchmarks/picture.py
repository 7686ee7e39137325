"""The report as one picture: every contestant of every cell, in multiples of the floor."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import contestants as who
from benchmarks.cases import CASES
from benchmarks.ratios import ratio
from benchmarks.records import Cell, Report
from benchmarks.workloads import WORKLOADS

MARKS = {
    who.AUTO: ("#0b3d91", "o"),
    who.GATHERED: ("#5b8dd9", "o"),
    "blocked": ("#1b998b", "o"),
    who.FUSED: ("#c1121f", "s"),
    who.COMPILED: ("#f77f00", "s"),
    who.FOREACH: ("#e5989b", "s"),
    who.LOOP: ("#9d4edd", "s"),
    who.FUNCTIONAL: ("#8d6e63", "s"),
    who.SCRIPTED: ("#d7b8a8", "s"),
    who.TORCHOPT: ("#7f7f7f", "s"),
}
"""Ours are discs, peers are squares."""


def draw(report: Report, path: Path) -> None:
    """Write the picture: one panel per workload.

    Raises:
        ValueError: there is nothing to draw.
    """
    cells = [cell for cell in report.cells if cell.device == "cpu"]
    workloads = [name for name in WORKLOADS if any(cell.workload == name for cell in cells)]
    if not workloads:
        raise ValueError("a picture needs at least one cell timed on the CPU, got none")
    figure = Figure(figsize=(11, 2.9 * ((len(workloads) + 1) // 2) + 1), layout="constrained")
    grid = figure.subplots((len(workloads) + 1) // 2, 2, squeeze=False, sharey=True)
    for axes, workload in zip(grid.flat, workloads, strict=False):
        _panel(axes, workload, [cell for cell in cells if cell.workload == workload])
    for axes in list(grid.flat)[len(workloads) :]:
        axes.set_visible(False)
    handles = [
        Axes.plot(grid.flat[0], [], [], mark, color=color, label=name)[0]
        for name, (color, mark) in MARKS.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False)
    machine = report.machine
    note = "" if report.size == "full" else f", size {report.size!r}"
    figure.suptitle(
        "Time of a step, in multiples of one pass of a loop in C (the floor, dashed)\n"
        f"{machine['cpu']}, {report.threads} threads, torch {machine['torch']}{note}",
        fontsize=11,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _panel(axes: Axes, workload: str, cells: list[Cell]) -> None:
    names = list(CASES)
    for cell in cells:
        height = names.index(cell.optimizer)
        for name, (color, mark) in MARKS.items():
            found = ratio(cell, name, who.FLOOR)
            if found is not None:
                axes.plot([found.least, found.greatest], [height] * 2, color=color, linewidth=1)
                front = 3 if name == who.AUTO else 2
                size = 4 if name == who.AUTO else 5
                axes.plot(found.median, height, mark, color=color, markersize=size, zorder=front)
    axes.axvline(1.0, color="black", linestyle="--", linewidth=0.8)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_title(workload, fontsize=10)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(axis="x", alpha=0.3)
