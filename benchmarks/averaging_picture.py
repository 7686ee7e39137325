"""Training over a slow link as one picture: the validation loss over time."""

from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.records import Report


def draw_averaging(report: Report, path: Path) -> None:
    """Write the picture: a curve for each way.

    Raises:
        ValueError: there is nothing to draw.
    """
    races = report.averaging_races
    if not races:
        raise ValueError("a picture needs at least one model trained over a slow link, got none")
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for one in races:
        axes.plot(*zip(*one.curve, strict=True), marker="o", markersize=3, label=one.way)
    some, machine = races[0], report.machine
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("validation loss, nats a character")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    note = "" if report.size == "full" else f", size {report.size!r}"
    figure.suptitle(
        f"{some.ranks} ranks, {some.megabits:g} Mbit/s each, {some.parameters:,} parameters\n"
        f"{machine['cpu']}, a thread per rank, gloo, torch {machine['torch']}{note}",
        fontsize=11,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
