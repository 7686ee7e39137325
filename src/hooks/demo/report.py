"""The results as tables for a terminal and as one picture."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from hooks.demo.result import RankResult

TWIN = "torch.optim.AdamW"


def mean_losses(ranks: Sequence[RankResult]) -> tuple[list[float], list[float]]:
    """The training losses of run A and of run B, mean over ranks, for every step."""
    return (
        [fmean(losses) for losses in zip(*(one.hook.losses for one in ranks), strict=True)],
        [fmean(losses) for losses in zip(*(one.torch.losses for one in ranks), strict=True)],
    )


def show(console: Console, ranks: Sequence[RankResult]) -> None:
    """Print the curves, what each rank holds, how far the runs differ, and a sample."""
    console.print(f"\nA: functional-optim, {ranks[0].front_end}\nB: {TWIN}\n", highlight=False)
    console.print(curves(ranks))
    console.print(memory(ranks))
    for line in differences(ranks):
        console.print(line, highlight=False)
    sample = ranks[0].sample
    console.print("\nModel A writes:\n", highlight=False)
    console.print(sample, markup=False, highlight=False, style="italic")


def curves(ranks: Sequence[RankResult]) -> Table:
    """Both loss curves at the steps where the validation loss was taken."""
    table = Table(title="Loss per character, in nats", title_justify="left")
    for title in ("steps", "train A", "train B", "validation A", "validation B"):
        table.add_column(title, justify="right")
    hook_losses, torch_losses = mean_losses(ranks)
    before = 0
    points = zip(ranks[0].hook.validation, ranks[0].torch.validation, strict=True)
    for (step, hook_validation), (_, torch_validation) in points:
        # The mean since the last line; before the first step there is none.
        since = slice(before, step)
        train = (hook_losses[since], torch_losses[since])
        table.add_row(
            str(step),
            *(f"{fmean(losses):.4f}" if losses else "" for losses in train),
            f"{hook_validation:.4f}",
            f"{torch_validation:.4f}",
        )
        before = step
    return table


def memory(ranks: Sequence[RankResult]) -> Table:
    """What each rank holds."""
    table = Table(title="Memory in MiB, on each rank", title_justify="left")
    table.add_column("rank", justify="right")
    table.add_column("run")
    for title in ("parameters", "gradients", "optimizer state", "process, peak"):
        table.add_column(title, justify="right")
    for one in ranks:
        for name, run in (("A", one.hook), ("B", one.torch)):
            held = (run.parameter_bytes, run.gradient_bytes, run.state_bytes)
            peak = f"{_mib(one.peak_rss_bytes)} (A + B)" if name == "A" else ""
            table.add_row(str(one.rank), name, *map(_mib, held), peak)
    return table


def differences(ranks: Sequence[RankResult]) -> list[str]:
    """The largest differences of final parameters, one line each."""
    between_runs = (one.difference.largest for one in ranks)
    lines = [("between A and B, on any rank", between_runs)]
    for name, runs in (("A", [one.hook for one in ranks]), ("B", [one.torch for one in ranks])):
        lines.append((f"of {name} between ranks", (run.from_rank_zero.largest for run in runs)))
    head = f"Largest absolute difference of the {ranks[0].numel:,} final parameters"
    return [head, *(f"  {what}: {_largest(values):.3g}" for what, values in lines)]


def _largest(values: Iterable[float]) -> float:
    """The maximum; NaN, which ``max`` may overlook, wins."""
    return max(values, key=lambda value: (value != value, value))  # noqa: PLR0124


def _mib(count: int) -> str:
    return f"{count / 2**20:,.2f}"


def draw(ranks: Sequence[RankResult], path: Path) -> None:
    """Write both curves, training and validation, as one picture."""
    ours = f"A (functional-optim, {ranks[0].front_end})"
    twin = f"B ({TWIN})"
    figure = Figure(figsize=(8, 5), layout="constrained")  # no pyplot: no window, no global state
    axes = figure.subplots()
    hook_losses, torch_losses = mean_losses(ranks)
    steps = range(1, len(hook_losses) + 1)
    # B is drawn first and wide, A narrow on top of it: where they agree, both are seen.
    axes.plot(steps, torch_losses, color="#f4b183", linewidth=4, label=f"{twin}, training")
    axes.plot(steps, hook_losses, color="#1f4e79", linewidth=1, label=f"{ours}, training")
    for run, color, size, name in (
        (ranks[0].torch, "#c55a11", 9, twin),
        (ranks[0].hook, "#1f4e79", 4, ours),
    ):
        places, losses = zip(*run.validation, strict=True)
        axes.plot(places, losses, "o", color=color, markersize=size, label=f"{name}, validation")
    axes.set(xlabel="steps", ylabel="loss per character (nats)", title="The same run, twice")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
