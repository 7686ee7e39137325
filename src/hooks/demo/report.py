"""Results of the demo as tables for a terminal, and as one picture."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from hooks.demo.result import RankResult, RunResult, largest, loss_difference

# Later runs are wider and are drawn first, so that equal curves are all visible.
STYLES: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"color": "#1f4e79", "linewidth": 1}, {"color": "#1f4e79", "markersize": 4}),
    ({"color": "#f4b183", "linewidth": 4}, {"color": "#c55a11", "markersize": 9}),
    ({"color": "#c5e0b4", "linewidth": 8}, {"color": "#548235", "markersize": 14}),
)
"""Options of the line and of the dots of each run's curve."""

NUMBERS = ("no", "one", "two", "three")
"""Numbers of runs, in words."""


def same_run(ranks: Sequence[RankResult], index: int) -> list[RunResult]:
    return [one.runs[index] for one in ranks]


def mean_losses(run: Sequence[RunResult]) -> list[float]:
    """Return the training loss of a run at every step, as the mean over ranks."""
    return [fmean(losses) for losses in zip(*(one.losses for one in run), strict=True)]


def show(console: Console, ranks: Sequence[RankResult]) -> None:
    """Print the curves, memory, differences between runs, and a sample."""
    console.print()
    for run in ranks[0].runs:
        console.print(f"{run.name}: {run.title}", highlight=False)
    console.print()
    console.print(curves(ranks))
    console.print(memory(ranks))
    if any(run.workers for run in ranks[0].runs):
        console.print("Rank 0 trains; of what is on workers it keeps nothing between steps.")
        console.print(workers_of(ranks[0].runs))
    else:
        console.print("Parameters are whole on each rank, and so are DDP's buckets of gradients.")
        console.print(state_shares(ranks), highlight=False)
        console.print(sent_shares(ranks), highlight=False)
    console.print()
    console.print(differences(ranks))
    for run in ranks[0].runs:
        if not run.exact:
            console.print(f"{run.name} {run.differs}.", highlight=False)
    sample = ranks[0].sample
    console.print("\nModel A writes:\n", highlight=False)
    console.print(sample, markup=False, highlight=False, style="italic")


def curves(ranks: Sequence[RankResult]) -> Table:
    """Return a table of the losses of all runs, at the steps with a validation loss."""
    runs = ranks[0].runs
    titles = [f"{what} {run.name}" for what in ("train", "valid.") for run in runs]
    table = _table("Loss per character, in nats", "steps", *titles)
    trained = [mean_losses(same_run(ranks, index)) for index in range(len(runs))]
    before = 0
    for points in zip(*(run.validation for run in runs), strict=True):
        step = points[0][0]
        # The mean since the last row; the first row has none.
        since = [losses[before:step] for losses in trained]
        table.add_row(
            str(step),
            *(f"{fmean(losses):.4f}" if losses else "" for losses in since),
            *(f"{loss:.4f}" for _, loss in points),
        )
        before = step
    return table


def memory(ranks: Sequence[RankResult]) -> Table:
    """Return a table of the memory of each rank."""
    titles = ("rank", "run", "parameters", "gradients", "optimizer state", "process, peak")
    table = _table("Memory in MiB, on each rank", *titles)
    for one in ranks:
        for run in one.runs:
            held = (run.parameter_bytes, run.gradient_bytes, run.state_bytes)
            peak = f"{_mib(one.peak_rss_bytes)} (all runs)" if run is one.runs[0] else ""
            table.add_row(str(one.rank), run.name, *map(_mib, held), peak)
        table.add_section()
    return table


def workers_of(runs: Sequence[RunResult]) -> Table:
    """Return a table of each worker's memory, and of the bytes that it received and sent."""
    titles = ("run", "worker", "steps", "parameters", "state", "gradients in", "parameters out")
    table = _table("Workers: steps, and MiB held and sent", *titles)
    for run in runs:
        for one in run.workers:
            moved = (one.parameter_bytes, one.state_bytes, one.gradient_bytes, one.read_bytes)
            table.add_row(run.name, one.name, str(one.steps), *map(_mib, moved))
    return table


def state_shares(ranks: Sequence[RankResult]) -> str:
    """Return each run's optimizer state on the fullest rank, as a share of run A's."""
    first, *others = (same_run(ranks, index) for index in range(len(ranks[0].runs)))
    shares = []
    for run in others:
        share = largest(
            one.state_bytes / whole.state_bytes for one, whole in zip(run, first, strict=True)
        )
        shares.append(f"{run[0].name} {share:.3f}")
    return f"Optimizer state on the fullest rank, in shares of A's: {', '.join(shares)}"


def sent_shares(ranks: Sequence[RankResult]) -> str:
    """Return the bytes that a rank sends per step, as shares of run A's."""
    first, *others = ranks[0].runs
    per_step = _mib(first.sent_bytes / len(first.losses))
    if not first.sent_bytes:
        return "Nothing is sent: there is one rank"
    shares = [f"{run.name} {run.sent_bytes / first.sent_bytes:.3f}" for run in others]
    return f"Sent by a rank in a step of A: {per_step} MiB; in shares of it: {', '.join(shares)}"


def differences(ranks: Sequence[RankResult]) -> Table:
    """Return a table of the differences of runs from run A, and of ranks from rank 0."""
    titles = ("between", "losses", f"{ranks[0].numel:,} final parameters")
    table = _table("Largest absolute difference, on any rank", *titles)
    first, *others = (same_run(ranks, index) for index in range(len(ranks[0].runs)))
    for run in others:
        losses = largest(loss_difference(*pair) for pair in zip(first, run, strict=True))
        final = largest(one.from_first.largest for one in run)
        table.add_row(f"{first[0].name} and {run[0].name}", f"{losses:.3g}", f"{final:.3g}")
    for run in (first, *others) if len(ranks) > 1 else ():
        final = largest(one.from_rank_zero.largest for one in run)
        table.add_row(f"ranks, in {run[0].name}", "", f"{final:.3g}")
    return table


def verdict(ranks: Sequence[RankResult]) -> str:
    """Return one sentence about results that passed all checks."""
    runs = ranks[0].runs
    exact = [run.name for run in runs if run.exact]
    who = "All runs" if len(exact) == len(runs) else f"Runs {' and '.join(exact)}"
    if len(exact) == 1:
        who = "The ranks of each run"
    losses = [f"{runs[0].validation[0][1]:.3f} -> {runs[0].validation[-1][1]:.3f}"]
    losses += [f"{run.name}'s {run.validation[-1][1]:.3f}" for run in runs if not run.exact]
    suffix = ", at the end" if len(exact) == 1 else ", on every rank" if len(ranks) > 1 else ""
    return f"{who} agree in every bit{suffix}; validation loss {', '.join(losses)}."


def _table(title: str, *columns: str) -> Table:
    """Return a table without rows; columns of numbers are aligned right."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        is_text = column in {"run", "worker", "between"}
        table.add_column(column, justify="left" if is_text else "right")
    return table


def _mib(count: float) -> str:
    return f"{count / 2**20:,.2f}"


def draw(ranks: Sequence[RankResult], path: Path) -> None:
    """Write the training and validation curves of all runs to one picture."""
    figure = Figure(figsize=(8, 5), layout="constrained")  # no pyplot: no window, no global state
    axes = figure.subplots()
    runs = [same_run(ranks, index) for index in range(len(ranks[0].runs))]
    for run, (line, _) in reversed(list(zip(runs, STYLES[: len(runs)], strict=True))):
        name = f"{run[0].name} ({run[0].title})"
        losses = mean_losses(run)
        axes.plot(range(1, len(losses) + 1), losses, label=f"{name}, training", **line)
    for run, (_, dots) in reversed(list(zip(runs, STYLES[: len(runs)], strict=True))):
        steps = [step for step, _ in run[0].validation]
        values = [loss for _, loss in run[0].validation]
        label = f"{run[0].name}, validation"
        axes.plot(steps, values, "o", label=label, **dots)
    axes.set(
        xlabel="steps",
        ylabel="loss per character (nats)",
        title=f"The same training, stepped in {NUMBERS[len(runs)]} ways",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
