"""``make bench``: the command."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self, get_args

import click
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import contestants as who
from benchmarks import publish, sharded
from benchmarks.cases import CASES
from benchmarks.merging import merged
from benchmarks.plan import QUICK_SECTIONS, SECTIONS, Settings, parts
from benchmarks.process import PartError
from benchmarks.records import Report
from benchmarks.run import run
from benchmarks.tables import summary
from benchmarks.workloads import WORKLOADS, Size

ROUNDS: dict[str, int] = {"full": 9, "quick": 3, "tiny": 2}
THREADS = min(2, os.cpu_count() or 1)


class Shown:
    """Progress of a run: a bar on a terminal, a line per part anywhere else."""

    def __init__(self, console: Console) -> None:
        self._console = console
        # The bar is drawn on events, never by a thread: a thread would disturb the timing.
        self._bar = Progress(
            BarColumn(20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
            console=console,
            auto_refresh=False,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None)
        self._done = -1

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, done: int, count: int, what: str) -> None:
        """Show that ``done`` of ``count`` parts are finished, and name the part that runs."""
        self._bar.update(self._task, completed=done, total=count, description=what, refresh=True)
        if not self._console.is_terminal and done != self._done:
            self._console.print(
                f"{time.strftime('%H:%M:%S')} {done}/{count} {what}", markup=False, highlight=False
            )
        self._done = done


@click.command(context_settings={"show_default": True})
@click.option("--quick", is_flag=True, help="Small sizes, few rounds: for a first look.")
@click.option(
    "--size",
    type=click.Choice(get_args(Size)),
    default=None,
    help="Size of the workloads.  [default: full]",
)
@click.option(
    "--rounds", type=click.IntRange(min=1), default=None, help="Turns of each.  [default: 9]"
)
@click.option(
    "--threads", type=click.IntRange(min=1), default=THREADS, help="Threads inside a step."
)
@click.option("--section", "sections", multiple=True, type=click.Choice(SECTIONS), help="Part.")
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    type=click.Choice(list(WORKLOADS)),
    help="What is stepped.",
)
@click.option(
    "--optimizer",
    "optimizers",
    multiple=True,
    type=click.Choice(list(CASES)),
    help="By which rule.",
)
@click.option(
    "--contestant",
    "contestants",
    multiple=True,
    type=click.Choice((*who.NAMES, *sharded.NAMES)),
    help="By whom.",
)
@click.option(
    "--place",
    "places",
    multiple=True,
    type=click.Choice(list(sharded.PLACES)),
    help="What is trained on how many ranks.",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs"),
    help="Folder for bench.json, bench.md and bench.png.",
)
@click.option("--write", is_flag=True, help="Put the tables and pictures into docs/.")
@click.option(
    "--from",
    "source",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Measure nothing: take this JSON of an earlier run.",
)
@click.option(
    "--onto",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Put what is measured in its place in this JSON of an earlier run.",
)
def bench(
    *,
    quick: bool,
    size: Size | None,
    rounds: int | None,
    threads: int,
    sections: Sequence[str],
    workloads: Sequence[str],
    optimizers: Sequence[str],
    contestants: Sequence[str],
    places: Sequence[str],
    output: Path,
    write: bool,
    source: Path | None,
    onto: Path | None,
) -> None:
    """Time every executor against its peers, as ratios of times taken in turns.

    Train a model in every storage, and compare its loss with that of float32.

    Train models on several ranks with sharded optimizers, ours and torch's.

    Count the bytes that averaging over ranks sends, and train over a slow link if possible.

    Step models on a server by several trainers, with ours and torch's DistributedOptimizer.

    Options that choose (--section, --workload, --optimizer, --contestant, --place) can be repeated.
    """
    if quick and size is not None:
        raise click.UsageError("--quick is --size quick: give one of them")
    taken: Size = size or ("quick" if quick else "full")
    settings = Settings(
        taken,
        rounds or ROUNDS[taken],
        threads,
        sections or (QUICK_SECTIONS if taken == "quick" else SECTIONS),
        workloads or tuple(WORKLOADS),
        optimizers or tuple(CASES),
        contestants,
        places or tuple(sharded.PLACES),
    )
    console = Console()
    if source is not None and onto is not None:
        raise click.UsageError("--from measures nothing, so nothing can be put --onto another run")
    if source is not None:
        report = Report.load(source)
    else:
        earlier = None if onto is None else Report.load(onto)
        _refuse_a_part(settings, write=write and earlier is None)
        report = _measured(settings, console, earlier, output)
    files = publish.write_files(report, output)
    console.print(Markdown(summary(report)))
    for what, why in {**report.skipped, **report.failed}.items():
        console.print(f"{what}: {why}", markup=False, highlight=False)
    if write:
        _refuse_small(report)
        files += publish.publish(report)
    for file in files:
        console.print(f"wrote {file}", markup=False, highlight=False, soft_wrap=True)


def _refuse_a_part(settings: Settings, *, write: bool) -> None:
    """Refuse to write partial results, before anything is measured."""
    if write and not settings.complete:
        raise click.UsageError(
            "--write needs a whole run in full size: leave out --quick, --size, --section, "
            "--workload, --optimizer, --contestant and --place"
        )


def _refuse_small(report: Report) -> None:
    whole = {(workload, case) for workload in WORKLOADS for case in CASES}
    found = {(cell.workload, cell.optimizer) for cell in report.cells if cell.device == "cpu"}
    if report.size != "full" or found != whole:
        raise click.UsageError(
            f"--write takes whole runs in full size, this one is of size {report.size!r} and has "
            f"{len(found)} of {len(whole)} cells"
        )


def _measured(settings: Settings, console: Console, earlier: Report | None, output: Path) -> Report:
    """Measure. After each part, write the results so far to the output folder."""
    names = {part.name for part in parts(settings, "")}

    def whole(report: Report) -> Report:
        return report if earlier is None else merged(earlier, report, names)

    try:
        with Shown(console) as shown:
            return whole(
                run(settings, shown, lambda so_far: whole(so_far).save(output / publish.RESULTS))
            )
    except (PartError, ValueError) as error:
        raise click.ClickException(str(error)) from error
