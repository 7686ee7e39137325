"""Asynchronous trainers on one server, compared with a synchronous run on the same samples.

    python examples/asynchronous_trainers.py

Trainers are threads. Each trainer takes the next batch, reads a snapshot of the parameters,
computes its gradients, and steps by them at once. No step changes the snapshot of another trainer.
The age of gradients is bounded: fast trainers wait for slow ones. The synchronous run steps by the
mean gradient of as many batches as there are trainers. So it makes fewer steps, and its learning
rate is larger by the root of that number (Malladi et al., "On the SDEs and scaling rules for
adaptive gradient algorithms", 2022).
"""

import copy
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import click
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor

from functional_optim import DistributedOptimizer
from functional_optim.remote import Counters
from hooks.demo import text
from hooks.demo.model import Decoder, mean_loss
from hooks.demo.progress import Progress

SERVER = "server"
POINTS = 12


class Settings(NamedTuple):
    """Options of one run."""

    batches: int
    batch_size: int
    trainers: int
    max_staleness: int
    lr: float


class Curve(NamedTuple):
    """Result of a run: its losses, seconds and counters."""

    points: list[tuple[int, float]]
    """Pairs of samples and validation loss."""
    seconds: float
    counters: Counters | None


class Task:
    """Small transformer, numbered batches of text, and the loss on validation text."""

    def __init__(self, settings: Settings) -> None:
        torch.manual_seed(0)
        self._corpus = text.corpus()
        self.model = Decoder(len(self._corpus.alphabet), width=96, heads=4, blocks=2)
        self._size = settings.batch_size
        self._validation = text.even_batch(self._corpus.validation, 64, self.model.context)

    def batch(self, number: int) -> text.Batch:
        """Return the batch with a number. All trainers get the same one."""
        chance = torch.Generator().manual_seed(number)
        return text.random_batch(self._corpus.train, self._size, self.model.context, chance)

    @torch.no_grad()
    def validate(self, model: Callable[[Tensor], Tensor]) -> float:
        """Return the validation loss."""
        return mean_loss(model, *self._validation).item()


def synchronous(task: Task, settings: Settings, progress: Progress) -> Curve:
    """Train with one step for as many batches as there are trainers."""
    model, points = copy.deepcopy(task.model), []
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=settings.lr * math.sqrt(settings.trainers))
    begin, every = time.perf_counter(), _every(settings)
    for first in range(0, settings.batches, settings.trainers):
        if first % every < settings.trainers:
            points.append((first * settings.batch_size, task.validate(model)))
            progress.note(first, {"synchronous": points[-1][1]})
        numbers = range(first, min(first + settings.trainers, settings.batches))
        for number in numbers:
            (mean_loss(model, *task.batch(number)) / len(numbers)).backward()
            progress.advance()
        optimizer.step()
        optimizer.zero_grad()
    points.append((settings.batches * settings.batch_size, task.validate(model)))
    return Curve(points, time.perf_counter() - begin, None)


def asynchronous(task: Task, settings: Settings, progress: Progress) -> Curve:
    """Train with one step for each batch. Each trainer steps as soon as it has its gradients."""
    model, points = copy.deepcopy(task.model), []
    where = {name: SERVER for name, _ in model.named_parameters()}
    optimizer = DistributedOptimizer.over_threads(torch.optim.AdamW, model, where, lr=settings.lr)
    optimizer.limit_staleness(settings.max_staleness, "wait")
    numbers, every, lock = iter(range(settings.batches)), _every(settings), threading.Lock()

    def trainer() -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            with optimizer.snapshot() as snapshot:
                version = partial(snapshot.run, model)
                if number % every == 0:
                    points.append((number * settings.batch_size, task.validate(version)))
                    progress.note(number, {"asynchronous": points[-1][1]})
                loss = mean_loss(version, *task.batch(number))
                grads = torch.autograd.grad(loss, list(snapshot.parameters.values()))
                optimizer.step(grads, snapshot)
            progress.advance()

    begin = time.perf_counter()
    with ThreadPoolExecutor(settings.trainers, thread_name_prefix="trainer") as pool:
        for one in [pool.submit(trainer) for _ in range(settings.trainers)]:
            one.result()
    counters = optimizer.counters()[SERVER]
    optimizer.close()
    points.append((settings.batches * settings.batch_size, task.validate(model)))
    return Curve(sorted(points), time.perf_counter() - begin, counters)


def _every(settings: Settings) -> int:
    """Return the number of batches from one validation loss to the next."""
    return max(settings.trainers, settings.batches // POINTS)


def told(counters: Counters) -> Table:
    """Return a table of the server's counters."""
    table = Table("counter", "value", title="The server", title_justify="left")
    ages = ", ".join(f"{age}: {steps}" for age, steps in sorted(counters.staleness.items()))
    for name, value in (
        ("steps", f"{counters.steps:,}"),
        ("steps that waited", f"{counters.waits:,}"),
        ("snapshots", f"{counters.reads:,}"),
        ("snapshots that waited", f"{counters.read_waits:,}"),
        ("MiB of gradients", f"{counters.gradient_bytes / 2**20:,.1f}"),
        ("MiB copied for readers", f"{counters.copied_bytes / 2**20:,.1f}"),
        ("staleness, mean", f"{counters.mean_staleness:.2f}"),
        ("steps by staleness", ages),
    ):
        table.add_row(name, value)
    return table


def draw(curves: dict[str, Curve], output: Path) -> None:
    """Write the curves as a picture."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, curve in curves.items():
        axes.plot(*zip(*curve.points, strict=True), "o-", label=f"{name}, {curve.seconds:.0f} s")
    axes.set(
        xlabel="samples",
        ylabel="validation loss per character (nats)",
        title="The same samples, by synchronous steps and by asynchronous trainers",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=150)


@click.command(context_settings={"show_default": True})
@click.option("--batches", type=click.IntRange(min=1), default=3200)
@click.option("--batch-size", type=click.IntRange(min=1), default=8)
@click.option("--trainers", type=click.IntRange(1, 64), default=4)
@click.option("--max-staleness", type=click.IntRange(min=0), default=6)
@click.option("--lr", type=click.FloatRange(min=0), default=1e-3)
@click.option("--output", type=Path, default=Path("runs/asynchronous_trainers.png"))
def main(*, output: Path, **choices: float) -> None:
    """Train by asynchronous trainers, and by synchronous steps, on the same samples."""
    settings = Settings(**choices)
    torch.set_num_threads(1)  # trainers share the cores
    task, curves = Task(settings), {}
    for name, train in (("synchronous", synchronous), ("asynchronous", asynchronous)):
        with Progress(settings.batches, shown=True) as progress:
            curves[name] = train(task, settings, progress)
    console = Console()
    console.print(told(curves["asynchronous"].counters))
    for name, curve in curves.items():
        console.print(
            f"{name}: validation loss {curve.points[0][1]:.3f} -> {curve.points[-1][1]:.3f} after "
            f"{curve.points[-1][0]:,} samples, {curve.seconds:.0f} s",
            highlight=False,
        )
    draw(curves, output)
    print(f"The curves: {output}")


if __name__ == "__main__":
    main()
