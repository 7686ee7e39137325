"""Pictures of training: small panels, one below the other, for the width of a phone."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.training.stack import stacks
from benchmarks.training.tasks import TASKS, Task

WIDTH = 4.2
"""Width in inches. A phone shows it as 360 pixels, and a font of 9 points as about 11 pixels."""
SERIES = 5
"""Maximum number of curves in one picture."""
STYLE: Any = {
    "font.size": 9,
    "font.family": "sans-serif",
    "svg.fonttype": "none",
    "svg.hashsalt": "functional-optim",
    "axes.spines.top": False,
    "axes.spines.right": False,
}
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#555555")
"""Colours of Okabe and Ito, which colour-blind readers can tell apart."""

Curve = Sequence[Sequence[float]]
Stored = Mapping[str, Mapping[str, Mapping[str, Any]]]


def draw(stored: Stored, folder: Path) -> None:
    """Write one picture for each problem, one for each algorithm, and one for the stacks."""
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        for key, task in TASKS.items():
            entries = stored.get(key, {})
            names = sorted(name for name in entries if name not in stacks())
            _save(_problem(task, entries, names), folder / f"{key}.svg")
        for name in sorted({name for entries in stored.values() for name in entries}):
            own = {key: stored[key][name] for key in TASKS if name in stored.get(key, {})}
            if own and name not in stacks():
                _save(_algorithm(own), folder / f"of_{name}.svg")
        if "stack" in stored:
            _save(_stacks(stored["stack"]), folder / "stack.svg")


def _problem(task: Task, entries: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> Figure:
    """Draw all algorithms on one problem, five in each panel."""
    panels = [names[start : start + SERIES] for start in range(0, len(names), SERIES)]
    figure, axes = _panels(len(panels), 1.75)
    for panel, own in zip(axes, panels, strict=True):
        for name, colour in zip(own, COLOURS, strict=False):
            _spread(panel, entries[name]["curves"], colour, name)
        _finish(panel, task, _values(entries.values()))
        panel.legend(fontsize=8, loc="upper right", framealpha=0.7, handlelength=1.2)
    axes[-1].set_xlabel("step")
    return figure


def _algorithm(own: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Draw one algorithm on all problems: a curve for each seed."""
    figure, axes = _panels(len(own), 1.4)
    for panel, (key, entry) in zip(axes, own.items(), strict=True):
        for curve, colour in zip(entry["curves"], COLOURS, strict=False):
            panel.plot(*zip(*_finite(curve), strict=True), color=colour, linewidth=1.2)
        _finish(panel, TASKS[key], _values([entry]))
        panel.set_title(TASKS[key].title, fontsize=9, loc="left")
    axes[-1].set_xlabel("step")
    return figure


def _stacks(entries: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Draw the stacks on the transformer."""
    figure, axes = _panels(1, 3.0)
    for (name, entry), colour in zip(entries.items(), COLOURS, strict=False):
        _spread(axes[0], entry["curves"], colour, name)
    axes[0].set_xlabel("step")
    axes[0].set_ylabel("held-out loss")
    axes[0].grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    return figure


def _panels(count: int, height: float) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(WIDTH, 0.5 + height * count), layout="constrained")
    axes = figure.subplots(count, squeeze=False)
    return figure, [one[0] for one in axes]


def _finish(panel: Axes, task: Task, values: Iterable[float]) -> None:
    """Add the threshold, a scale and the grid."""
    panel.axhline(task.threshold, color="black", linewidth=0.8, linestyle="--")
    found = [one for one in values if one > 0]
    top = max([*found[:1], task.threshold]) if found else 1.0
    low = min([*found, task.threshold])
    if task.logarithmic:
        panel.set_yscale("log")
        panel.set_ylim(max(low, task.threshold * 1e-4) / 2, 4 * top)
    else:
        panel.set_ylim(low - 0.1, 1.1 * top)
    panel.set_ylabel(task.axis)
    panel.set_xlim(0, task.steps)
    panel.minorticks_off()
    panel.grid(alpha=0.3)


def _values(entries: Iterable[Mapping[str, Any]]) -> list[float]:
    """Return all scores that are numbers, the first of them a score at the start."""
    return [
        score
        for entry in entries
        for curve in entry["curves"]
        for _, score in curve
        if math.isfinite(score)
    ]


def _finite(curve: Curve) -> Curve:
    return [point for point in curve if math.isfinite(point[1])]


def _spread(panel: Axes, curves: Sequence[Curve], colour: str, name: str) -> None:
    """Draw the median of the seeds, and the range around it."""
    steps, low, middle, high = [], [], [], []
    for points in zip(*map(_finite, curves), strict=False):
        scores = sorted(score for _, score in points)
        steps.append(points[0][0])
        low.append(scores[0])
        middle.append(scores[len(scores) // 2])
        high.append(scores[-1])
    panel.plot(steps, middle, color=colour, linewidth=1.3, label=name)
    panel.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None})
