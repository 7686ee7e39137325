"""A custom optimizer class: registered, scripted, and stepped on workers over torch RPC.

    python examples/custom_class.py

QHM (Ma & Yarats 2019) is written here like any class of torch.optim. DistributedOptimizer accepts
the class: each worker then runs its Python code, with one warning. The class can be registered with
its functional equivalent, here the package's ``qhm``. Then workers step without Python code, and
TorchScript can compile the step. All three ways train a small transformer to the same bits.
"""

import copy
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import click
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.distributed import rpc

from functional_optim import (
    DistributedOptimizer,
    as_functional_optim,
    qhm,
    register_functional_optim,
)
from hooks.demo import text
from hooks.demo.model import Decoder, mean_loss
from hooks.demo.processes import run_processes
from hooks.demo.progress import Progress

WORKERS = ("worker1", "worker2")
OPTIONS = {"lr": 0.5, "momentum": 0.95, "nu": 0.7}
POINTS = 6


class QHM(torch.optim.Optimizer):
    """Quasi-hyperbolic momentum: steps by momentum and a share of the plain gradient.

    b = momentum * b + (1 - momentum) * g;  p = p - lr * ((1 - nu) * g + nu * b)
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1.0,
        momentum: float = 0.999,
        nu: float = 0.7,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "nu": nu})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Make one step by ``.grad``, parameter by parameter."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(param)
                buffer = state["momentum_buffer"].lerp_(param.grad, 1 - group["momentum"])
                param.add_(param.grad.lerp(buffer, group["nu"]), alpha=-group["lr"])


class Run(NamedTuple):
    """Way of stepping the model, and its results so far."""

    title: str
    step: Callable[[text.Batch], tuple[float, float]]
    """Makes one step. Returns the loss before it, and the seconds of the optimizer."""
    parameters: Callable[[], Sequence[Tensor]]
    losses: list[float]
    seconds: list[float]


def on_workers(title: str, model: nn.Module) -> Run:
    """Return a run of the class on two workers, which own the parameters in turns."""
    pairs = zip(cycle(WORKERS), model.named_parameters(), strict=False)
    params = [
        (name, rpc.remote(worker, nn.Parameter, args=(param.detach().clone(),)))
        for worker, (name, param) in pairs
    ]
    optimizer = DistributedOptimizer(QHM, params, **OPTIONS)

    def step(batch: text.Batch) -> tuple[float, float]:
        snapshot = optimizer.snapshot()
        loss = mean_loss(partial(snapshot.run, model), *batch)
        grads = torch.autograd.grad(loss, list(snapshot.parameters.values()))
        begin = time.perf_counter()
        optimizer.step(grads, snapshot)
        return loss.item(), time.perf_counter() - begin

    return Run(title, step, lambda: list(optimizer.snapshot().parameters.values()), [], [])


def scripted(title: str, model: nn.Module) -> Run:
    """Return a run of the functional equivalent, as one TorchScript program in this process."""
    params = list(model.parameters())
    program = as_functional_optim(QHM, **OPTIONS).script(params)

    def step(batch: text.Batch) -> tuple[float, float]:
        loss = mean_loss(model, *batch)
        grads = torch.autograd.grad(loss, params)
        begin = time.perf_counter()
        program.step(list(grads))
        return loss.item(), time.perf_counter() - begin

    return Run(title, step, lambda: params, [], [])


def runs_of(model: nn.Module) -> list[Run]:
    """Return all three runs. Register the class after the first one is built."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        first = on_workers("the class itself, on 2 workers", model)
    print("\n".join(str(one.message) for one in seen))
    register_functional_optim(QHM, qhm)
    second = on_workers("registered, on 2 workers", model)
    return [first, second, scripted("scripted, in one process", copy.deepcopy(model))]


def train(steps: int, batch_size: int, output: Path) -> None:
    """Train every run in the trainer's process, draw the losses, and compare the runs."""
    torch.manual_seed(0)
    corpus, chance = text.corpus(), torch.Generator().manual_seed(0)
    model = Decoder(len(corpus.alphabet), width=96, heads=4, blocks=2)
    runs = runs_of(model)
    with Progress(steps, shown=True) as progress:
        for number in range(steps):
            batch = text.random_batch(corpus.train, batch_size, model.context, chance)
            for run in runs:
                loss, seconds = run.step(batch)
                run.losses.append(loss)
                run.seconds.append(seconds)
            progress.advance()
            if number % max(1, steps // POINTS) == 0:
                progress.note(number, {"": runs[0].losses[-1]}, "loss")
    for run in runs:
        print(
            f"{run.title}: loss {run.losses[0]:.3f} -> {run.losses[-1]:.3f}, {typical(run):.2f} ms"
        )
    draw(runs, output)
    print(f"The curves: {output}")
    check_same(runs)


def check_same(runs: Sequence[Run]) -> None:
    """Check that all runs have the same losses and parameters.

    Raises:
        RuntimeError: two runs differ.
    """
    first = runs[0]
    for run in runs[1:]:
        pairs = zip(first.parameters(), run.parameters(), strict=True)
        if run.losses != first.losses or not all(torch.equal(*pair) for pair in pairs):
            raise RuntimeError(f"{first.title!r} and {run.title!r} ended with other bits")
    print("All runs agree in every bit.")


def typical(run: Run) -> float:
    """Return the median time of the optimizer's step, in ms."""
    return sorted(run.seconds)[len(run.seconds) // 2] * 1000


def draw(runs: Sequence[Run], output: Path) -> None:
    """Write the curves, and the times of steps, as a picture."""
    figure = Figure(figsize=(10, 5), layout="constrained")
    curves, times = figure.subplots(1, 2)
    for width, run in zip((7, 4, 1), runs, strict=True):  # all curves are visible where they agree
        curves.plot(run.losses, linewidth=width, label=run.title)
        times.barh(run.title, typical(run))
    curves.set(xlabel="steps", ylabel="loss per character (nats)", title="QHM, run in three ways")
    curves.legend()
    times.set(xlabel="ms", title="One step of the optimizer, median")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=150)


@click.command(context_settings={"show_default": True})
@click.option("--steps", type=click.IntRange(min=1), default=300)
@click.option("--batch-size", type=click.IntRange(min=1), default=16)
@click.option("--output", type=Path, default=Path("runs/custom_class.png"))
def main(*, steps: int, batch_size: int, output: Path) -> None:
    """Train by a class of one's own: as it is, registered, and scripted."""
    run_processes(["trainer", *WORKERS], train, steps, batch_size, output)


if __name__ == "__main__":
    main()
