"""``make claims``: the command."""

import click
import torch

from benchmarks.claims.claims import SEEDS
from benchmarks.claims.page import Measured, page, told
from benchmarks.claims.runs import RATES, RUNS, SMALL, TINY, Scale, best_rate, train
from benchmarks.process import ROOT

PAGE = ROOT / "docs" / "claims.md"


@click.command(context_settings={"show_default": True})
@click.option(
    "--tiny", is_flag=True, help="A few steps of a model that learns nothing: a rehearsal."
)
@click.option("--write", is_flag=True, help="Put the page into docs/.")
def claims(*, tiny: bool, write: bool) -> None:
    """Test claims of papers about training with few means, on a small model.

    The command takes a few minutes on one thread. On one machine, the results are the same each
    time.
    """
    if tiny and write:
        raise click.UsageError("--write takes whole runs: leave out --tiny")
    scale = TINY if tiny else SMALL
    found = measured(scale)
    text = page(found, scale)
    click.echo(text)
    click.echo(told(found))
    if write:
        PAGE.write_text(text, encoding="utf-8")
        click.echo(f"wrote {PAGE}")


def measured(scale: Scale) -> Measured:
    """Return the loss of every run in every seed. One thread keeps the order of sums."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = Measured({}, {}, {})
        for name, run in RUNS.items():
            tried = {rate: [train(run, seed, scale, rate) for seed in SEEDS] for rate in RATES}
            rate = found.rates[name] = best_rate(tried)
            found.same[name], found.best[name] = tried[RATES[0]], tried[rate]
            shown = " ".join(f"{loss:.3f}" for loss in (*found.same[name], *found.best[name]))
            click.echo(f"{name}, at {RATES[0]:g} and {rate:g}: {shown}", err=True)
        return found
    finally:
        torch.set_num_threads(threads)
