"""Command ``functional-optim demo``."""

import time
from pathlib import Path

import click
from rich.console import Console

from hooks.demo import report
from hooks.demo.front_ends import FRONT_ENDS
from hooks.demo.launch import LaunchError, launch
from hooks.demo.result import judge
from hooks.demo.settings import RPC, Settings

PICTURE_SUFFIXES = (".pdf", ".png", ".svg")
FEWEST_RPC_RANKS = 2
FEWEST_STEPS = 6  # fewer do not bring the loss down clearly


@click.command(
    short_help="Train a small model in three ways, and compare.",
    context_settings={"show_default": True},
)
@click.option(
    "--steps",
    type=click.IntRange(min=FEWEST_STEPS),
    default=Settings.steps,
    help="Steps of each run.",
)
@click.option(
    "--ranks",
    type=click.IntRange(1, 16),
    default=Settings.ranks,
    help="Processes, each with its own data; for rpc, a trainer and workers.",
)
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    default=Settings.batch_size,
    help="Stretches of text per rank and step.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**31 - 1),
    default=Settings.seed,
    help="For the first weights and the order of the text.",
)
@click.option(
    "--front-end",
    "--frontend",
    "front_end",
    type=click.Choice([*FRONT_ENDS, RPC]),
    default=Settings.front_end,
    help="What is compared.",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("runs/demo.png"),
    help="Where to write the picture of the curves.",
)
def demo(
    *, steps: int, ranks: int, batch_size: int, seed: int, front_end: str, output: Path
) -> None:
    """Train a small transformer twice under DDP, a third time by ZeRO, and compare.

    Run A is stepped inside DDP, bucket by bucket, by functional-optim; run B by torch.optim.AdamW
    after DDP; run C by ZeroRedundancyOptimizer during backward, with a part of the optimizer's
    state on each rank. All runs have the same first weights and the same data (different on every
    rank). The exit code is 0 only if losses and final parameters are equal bit by bit, between
    runs and between ranks, and the validation loss fell clearly. On more than 2 ranks, C adds
    gradients in another order than A and B: its last validation loss must then be close to theirs.

    With --front-end local-sgd, run A is torch.optim.AdamW after DDP. In B and C each rank steps by
    its own gradients, and parameters are averaged every 4 and every 16 steps. The demo shows the
    sent bytes and the losses, which must be within a tenth of A's.

    With --front-end rpc, run A is torch.optim.AdamW in one process. In B the parameters are on the
    other processes, and DistributedOptimizer steps them over torch RPC, with the same bits.

    \b
    Examples:
      functional-optim demo
      functional-optim demo --steps 60 --ranks 4 --front-end local-sgd

    \b
    Exit codes:
      0  the runs agree as described above
      1  they do not, or a process failed
      2  wrong arguments
    """
    _check_output(output)
    if front_end == RPC and ranks < FEWEST_RPC_RANKS:
        raise click.BadParameter(
            f"for --front-end rpc it must be at least {FEWEST_RPC_RANKS}, a trainer and a worker "
            f"that owns the parameters, got {ranks}",
            param_hint="--ranks",
        )
    settings = Settings(steps, ranks, batch_size, seed, front_end)
    console = Console()
    ways = "two" if front_end == RPC else "three"
    console.print(
        f"Training for {steps} steps on {ranks} processes, in {ways} ways ...", highlight=False
    )
    begin = time.perf_counter()
    try:
        results = launch(settings)
    except LaunchError as error:
        raise click.ClickException(str(error)) from error
    seconds = time.perf_counter() - begin
    report.show(console, results)
    report.draw(results, output)
    console.print(f"\n{seconds:.0f} s. The curves: {output}", highlight=False, soft_wrap=True)
    wrong = judge(results)
    if wrong:
        raise click.ClickException("; ".join(wrong))
    console.print(report.verdict(results), highlight=False, soft_wrap=True)


def _check_output(output: Path) -> None:
    """Check before training that the picture can be written."""
    if output.suffix.lower() not in PICTURE_SUFFIXES:
        raise click.BadParameter(
            f"a picture's name must end in {', '.join(PICTURE_SUFFIXES)}, got {str(output)!r}",
            param_hint="--output",
        )
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.BadParameter(
            f"the folder {str(output.parent)!r} cannot be made: {error.strerror}; name another",
            param_hint="--output",
        ) from error
