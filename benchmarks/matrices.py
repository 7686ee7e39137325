"""torch.optim.Muon against ours on many matrices: ``python -m benchmarks.matrices``.

Contestants take turns: see :mod:`benchmarks.timing`. A ratio is the time of one of our steps
divided by torch's, within a round. The goal is below 0.5 on heads and small matrices, and never
above 1.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import click
import torch
from torch import Tensor
from torch.nn import Parameter

from benchmarks.ratios import Spread, spread
from benchmarks.timing import Step, take_turns
from functional_optim import TorchOptimizer, muon
from functional_optim.kernels import ExecutorName

SHAPES: Mapping[str, list[tuple[int, int]]] = {
    "200 x (64, 64)": [(64, 64)] * 200,
    "GPT-2 small, a layer's heads": [(64, 768)] * 36 + [(768, 64)] * 12,
    "GPT-2 small, a layer whole": [(768, 768)] * 4 + [(3072, 768), (768, 3072)],
    "100 shapes": [(8 + k, 64) for k in range(100)],
    "one (256, 256)": [(256, 256)],
}
"""Matrices that one optimizer steps, by name."""

TINY: Mapping[str, list[tuple[int, int]]] = {"8 x (4, 4)": [(4, 4)] * 8, "one": [(2, 3)]}

WAYS: tuple[ExecutorName, ...] = ("reference", "auto")
THEIRS = "torch.optim.Muon"
FRONT = "TorchOptimizer"


def _tensors(shapes: list[tuple[int, int]], dtype: torch.dtype, seed: int) -> list[Tensor]:
    draws = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draws).to(dtype) for shape in shapes]


class Contestant(NamedTuple):
    """Contestant that steps its own matrices by Muon."""

    step: Step
    params: Sequence[Tensor]


def contestants(shapes: list[tuple[int, int]], dtype: torch.dtype) -> dict[str, Contestant]:
    """Return torch's class, our drop-in class, and each executor. All start with equal matrices."""
    grads = _tensors(shapes, dtype, 1)

    def parameters() -> list[Parameter]:
        made = [Parameter(one) for one in _tensors(shapes, dtype, 0)]
        for param, grad in zip(made, grads, strict=True):
            param.grad = grad
        return made

    theirs, front = parameters(), parameters()
    found = {
        THEIRS: Contestant(torch.optim.Muon(theirs).step, theirs),
        FRONT: Contestant(TorchOptimizer(front, muon()).step, front),
    }
    for way in WAYS:
        optimizer, params = muon().using(executor=way), _tensors(shapes, dtype, 0)
        state: Any = optimizer.init(params)
        found[way] = Contestant(partial(optimizer.update_, params, grads, state), params)
    return found


def measured(
    shapes: list[tuple[int, int]], dtype: torch.dtype, rounds: int, turn_seconds: float
) -> dict[str, Spread]:
    """Return the ratio of each of our times to torch's."""
    steps = {name: one.step for name, one in contestants(shapes, dtype).items()}
    for step in steps.values():
        step()  # the first steps try out and plan; they are not timed
    seconds = take_turns(
        steps, rounds=rounds, turn_seconds=turn_seconds, wait=lambda: None, tell=lambda _: None
    )
    return {name: spread(seconds[name], seconds[THEIRS]) for name in steps if name != THEIRS}


@click.command()
@click.option("--threads", default=1, show_default=True, help="Threads of torch.")
@click.option("--rounds", default=7, show_default=True, help="Turns of each contestant.")
@click.option("--seconds", default=0.2, show_default=True, help="How long a turn is at least.")
@click.option("--tiny", is_flag=True, help="A few small matrices, to see that it runs.")
def main(threads: int, rounds: int, seconds: float, *, tiny: bool) -> None:
    """Print a table: the time of our steps by torch's, median (least to greatest)."""
    torch.set_num_threads(threads)
    names = [FRONT, *WAYS]
    many = "1 thread" if threads == 1 else f"{threads} threads"
    click.echo(f"| matrices, {many} | dtype | {' | '.join(names)} |")
    click.echo("| " + " | ".join(["---"] * (2 + len(names))) + " |")
    for name, shapes in (TINY if tiny else SHAPES).items():
        for dtype in (torch.float32, torch.bfloat16):
            found = measured(shapes, dtype, rounds, seconds)
            cells = " | ".join(str(found[one]) for one in names)
            click.echo(f"| {name} | {str(dtype).removeprefix('torch.')} | {cells} |")


if __name__ == "__main__":
    main()
