"""``make convergence``: the command."""

import json
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import click

from benchmarks.process import ROOT
from benchmarks.training import contestants
from benchmarks.training.picture import draw
from benchmarks.training.run import Result, results_of, searched
from benchmarks.training.stack import results_of_stack, stacks
from benchmarks.training.tasks import TASKS

DATA = ROOT / "docs" / "_data" / "convergence.json"
PICTURES = ROOT / "docs" / "pictures" / "convergence"

Stored = dict[str, dict[str, Any]]
"""Learning rate, and the curve of each seed, for each problem and algorithm."""


@click.command(context_settings={"show_default": True})
@click.option("--workers", default=2, help="Processes, each with one thread.")
@click.option("--only", multiple=True, help="Names of algorithms; the others keep their results.")
@click.option("--search", is_flag=True, help="Train only what fails, at other learning rates.")
@click.option("--draw-only", is_flag=True, help="Train nothing: draw what is stored.")
def convergence(*, workers: int, only: Sequence[str], search: bool, draw_only: bool) -> None:
    """Train every algorithm on five small problems, and write pictures and results into docs.

    Then run ``python -m docs.generate convergence.md`` for the page. It takes some minutes.
    """
    stored: Stored = json.loads(DATA.read_text("utf-8")) if DATA.exists() else {}
    wanted = [] if draw_only or search else list(only) or [*contestants.names(), *stacks()]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        for name, found in zip(wanted, pool.map(_results, wanted), strict=True):
            click.echo(f"{name}: {_shown(found)}")
            for task, result in found.items():
                stored.setdefault(task, {})[name] = _entry(result)
            _write(stored)  # an interrupted run keeps its results
        pairs = [] if draw_only else _failing(stored, only)
        for (name, task), result in zip(pairs, pool.map(_searched, pairs), strict=True):
            click.echo(f"{name}: {_shown({task: result})}")
            stored[task][name] = {**_entry(result), "searched": True}
            _write(stored)
    draw(_ordered(stored), PICTURES)


def _failing(stored: Stored, only: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs of algorithm and problem that fail, and have not been searched yet."""
    return [
        (name, task)
        for task in TASKS
        for name, entry in stored.get(task, {}).items()
        if name in (only or contestants.names())
        and contestants.has_rate(name)
        and "searched" not in entry
        and any(curve[-1][1] > TASKS[task].threshold for curve in entry["curves"])
    ]


def _searched(pair: tuple[str, str]) -> Result:
    return searched(*pair)


def _ordered(stored: Stored) -> Stored:
    return {task: dict(sorted(entries.items())) for task, entries in stored.items()}


def _write(stored: Stored) -> None:
    DATA.parent.mkdir(exist_ok=True)
    text = json.dumps(_ordered(stored), separators=(",", ":"))
    DATA.write_text(f"{text}\n", encoding="utf-8")


def _results(name: str) -> dict[str, Result]:
    return results_of_stack(name) if name in stacks() else results_of(name)


def _entry(result: Result) -> dict[str, Any]:
    curves = [
        [[step, float(f"{score:.4g}")] for step, score in zip(*run, strict=True)]
        for run in result.runs
    ]
    return {"rate": result.rate, "curves": curves}


def _shown(found: dict[str, Result]) -> str:
    return "; ".join(
        f"{task} {' '.join(f'{run.last:.3g}' for run in one.runs)} at {one.rate}"
        for task, one in found.items()
    )
