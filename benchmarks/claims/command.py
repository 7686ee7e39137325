"""``make claims``: the command."""

from pathlib import Path

import click
import torch

from benchmarks.claims.claims import SEEDS, Losses
from benchmarks.claims.page import page, told
from benchmarks.claims.runs import RUNS, SMALL, TINY, Scale, train
from benchmarks.process import ROOT

PAGE = ROOT / "docs" / "claims.md"


@click.command(context_settings={"show_default": True})
@click.option(
    "--tiny", is_flag=True, help="A few steps of a model that learns nothing: a rehearsal."
)
@click.option("--write", is_flag=True, help="Put the page into docs/.")
def claims(*, tiny: bool, write: bool) -> None:
    """Try what papers say of training with few means, in small, and say what was reproduced.

    It takes a few minutes, on one thread, and gives the same numbers each time on one machine.
    """
    if tiny and write:
        raise click.UsageError("--write takes whole runs: leave out --tiny")
    scale = TINY if tiny else SMALL
    losses = measured(scale)
    click.echo(page(losses, scale))
    click.echo(told(losses))
    if write:
        _written(page(losses, scale), PAGE)


def measured(scale: Scale) -> Losses:
    """The loss of every run in every seed, on one thread: sums are then in one order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found: dict[str, list[float]] = {}
        for name, run in RUNS.items():
            found[name] = [train(run, seed, scale) for seed in SEEDS]
            click.echo(f"{name}: {' '.join(f'{loss:.3f}' for loss in found[name])}", err=True)
        return found
    finally:
        torch.set_num_threads(threads)


def _written(text: str, file: Path) -> None:
    file.write_text(text, encoding="utf-8")
    click.echo(f"wrote {file}")
