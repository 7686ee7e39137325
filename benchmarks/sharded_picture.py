"""Sharded training as one picture: every contestant, as a multiple of torch ZeRO's best time."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import sharded as who
from benchmarks.ratios import ratio
from benchmarks.records import Report, Sharded

OURS, PEER = ("#0b3d91", "o"), ("#c1121f", "s")
"""Colours and markers: discs for ours, squares for peers."""


def draw_sharded(report: Report, path: Path) -> None:
    """Write the picture: one panel per model and number of ranks.

    Raises:
        ValueError: there is nothing to draw.
    """
    places = [one for one in report.sharded if one.cell.heats]
    if not places:
        raise ValueError("a picture needs at least one model that was trained, got none")
    figure = Figure(figsize=(2.6 * len(places) + 3, 4.5), layout="constrained")
    grid = figure.subplots(1, len(places), squeeze=False, sharey=True)
    for axes, place in zip(grid.flat, places, strict=True):
        _panel(axes, place)
    machine = report.machine
    note = "" if report.size == "full" else f", size {report.size!r}"
    figure.suptitle(
        f"Time of an iteration, in multiples of {who.TORCH_BEST} (dashed)\n"
        f"{machine['cpu']}, a thread per rank, gloo, torch {machine['torch']}{note}",
        fontsize=11,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _panel(axes: Axes, place: Sharded) -> None:
    for height, name in enumerate(who.NAMES):
        found = ratio(place.cell, name, who.TORCH_BEST)
        if found is not None:
            color, mark = OURS if name in who.OURS else PEER
            axes.plot([found.least, found.greatest], [height] * 2, color=color, linewidth=1)
            axes.plot(found.median, height, mark, color=color, markersize=5)
    axes.axvline(1.0, color="black", linestyle="--", linewidth=0.8)
    axes.set_title(place.cell.workload, fontsize=10)
    axes.set_yticks(range(len(who.NAMES)), who.NAMES)
    axes.set_ylim(len(who.NAMES) - 0.5, -0.5)
    axes.grid(axis="x", alpha=0.3)
