"""Steps of many small parameters by ZeRO, as constructed: ``python -m benchmarks.sharded_small``.

All contestants take turns in the same processes: ours, TorchOptimizer, torch's fused AdamW, and
torch's ZeRO with its best options. A ratio is the time of one step divided by another, within a
round. The goal on one rank: a step of ours takes at most 1.5 times as long as TorchOptimizer, and
less time than torch's fused AdamW.
"""

import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.nn import Parameter

from benchmarks.ratios import spread, spread_of
from functional_optim import TorchOptimizer, adamw
from sharding import ZeroRedundancyOptimizer

OURS, ELEMENTS = "ZeRO, as constructed", "ZeRO, elements"
FRONT, FUSED, THEIRS = "TorchOptimizer", "torch.optim.AdamW, fused", "torch ZeRO, fused, views"
LR = 1e-3


def _params(count: int, elements: int) -> list[Parameter]:
    draws = torch.Generator().manual_seed(0)
    params = [Parameter(torch.randn(elements, generator=draws)) for _ in range(count)]
    for param in params:
        param.grad = torch.randn(elements, generator=draws)
    return params


def contestants(count: int, elements: int) -> dict[str, Callable[[], Any]]:
    """Return the steps. Each contestant has its own parameters."""
    with warnings.catch_warnings():  # torch's package warns about TorchScript when it is imported
        warnings.simplefilter("ignore", DeprecationWarning)
        theirs = import_module("torch.distributed.optim").ZeroRedundancyOptimizer
    best = {"fused": True, "parameters_as_bucket_view": True}
    made: Mapping[str, Callable[[Any], Any]] = {
        OURS: lambda params: ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=LR),
        ELEMENTS: lambda params: ZeroRedundancyOptimizer(
            params, torch.optim.AdamW, policy="elements", lr=LR
        ),
        FRONT: lambda params: TorchOptimizer(params, adamw(lr=LR)),
        FUSED: lambda params: torch.optim.AdamW(params, lr=LR, fused=True),
        THEIRS: lambda params: theirs(params, torch.optim.AdamW, lr=LR, **best),
    }
    return {name: make(_params(count, elements)).step for name, make in made.items()}


def measured(count: int, elements: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each step, round by round. All ranks begin each turn together."""
    steps = contestants(count, elements)
    for step in steps.values():
        for _ in range(4):  # the first steps plan; they are not timed
            step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def lines(world: int, seconds: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the table rows for a number of ranks."""
    found = []
    for name in (OURS, ELEMENTS):
        against = " | ".join(str(spread(seconds[name], seconds[k])) for k in (FRONT, FUSED, THEIRS))
        milliseconds = spread_of([1e3 * one for one in seconds[name]])
        found.append(f"| {world} | {name} | {milliseconds} | {against} |")
    return found


def _rank(rank: int, world: int, store: str, count: int, elements: int, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    seconds = measured(count, elements, rounds)
    if rank == 0:
        click.echo("\n".join(lines(world, seconds)))
    dist.destroy_process_group()


@click.command()
@click.option("--rounds", default=25, show_default=True, help="Turns of each contestant.")
@click.option("--tiny", is_flag=True, help="A few parameters on one rank, to see that it runs.")
def main(rounds: int, *, tiny: bool) -> None:
    """Print a table: times in ms and ratios, median (least to greatest)."""
    count, elements = (20, 4) if tiny else (2000, 100)
    against = " | ".join(f"by {name}" for name in (FRONT, FUSED, THEIRS))
    click.echo(f"| ranks | {count} parameters of {elements} | ms | {against} |")
    click.echo("| " + " | ".join(["---"] * 6) + " |")
    for world in (1,) if tiny else (1, 2, 4):
        with tempfile.TemporaryDirectory() as folder:
            arguments = (world, str(Path(folder, "store")), count, elements, rounds)
            multiprocessing.spawn(_rank, arguments, world)


if __name__ == "__main__":
    main()
