"""Pointwise algorithms against the floor of memory traffic: ``python -m benchmarks.pointwise``.

Contestants take turns: see :mod:`benchmarks.timing`. A ratio is the time per byte of a step of
``TorchOptimizer`` divided by the time per byte of AdamW as a loop in C. The bytes are the least
that a step can move: it reads each value once, and writes each value that changes once.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import click
import torch
from torch.nn import Parameter

from benchmarks.cases import CASES
from benchmarks.peers.floor import Floor
from benchmarks.ratios import Spread, spread
from benchmarks.timing import Step, take_turns
from functional_optim import Optimizer, TorchOptimizer, adamw, adan, ademamix, adopt, lion

Shapes = Sequence[tuple[int, ...]]

SHAPES: Mapping[str, Shapes] = {
    "1 x 20 M": ((20_000_000,),),
    "100 x 100,000": ((100_000,),) * 100,
}
"""Tensors that are stepped together, larger than the caches."""

TINY: Mapping[str, Shapes] = {"2 x (2, 3)": ((2, 3),) * 2}


class Pointwise(NamedTuple):
    """An algorithm, and the bytes that a step of it moves for each float32 parameter."""

    make: Callable[[], Optimizer]
    bytes: int


ALGORITHMS: Mapping[str, Pointwise] = {
    "Lion": Pointwise(partial(lion, 1e-4), 20),
    "AdamW": Pointwise(partial(adamw, 1e-4), 28),
    "ADOPT": Pointwise(partial(adopt, 1e-4), 28),
    "AdEMAMix": Pointwise(partial(ademamix, 1e-4), 36),
    "Adan": Pointwise(partial(adan, 1e-4), 44),
}
FLOOR = "AdamW"


def contestants(make: Callable[[], Optimizer], shapes: Shapes, threads: int) -> dict[str, Step]:
    """Return a step of ``TorchOptimizer``, and one of the loop in C over as many elements."""
    draws = torch.Generator().manual_seed(0)
    params = [Parameter(torch.randn(shape, generator=draws)) for shape in shapes]
    for one in params:
        one.grad = torch.randn(one.shape, generator=draws)
    count = sum(map(math.prod, shapes))
    buffers = [torch.randn(count, generator=draws) for _ in range(2)]
    buffers += [torch.zeros(count) for _ in range(2)]
    loop = CASES[FLOOR].floor
    floor = Floor(loop.kernel, loop.coefficients, buffers, threads, varying=loop.varying)
    return {"ours": TorchOptimizer(params, make()).step, "floor": floor}


def measured(one: Pointwise, shapes: Shapes, threads: int, rounds: int, seconds: float) -> Spread:
    """Return the time per byte of our step by that of the floor."""
    steps = contestants(one.make, shapes, threads)
    for step in [*steps.values()] * 5:
        step()  # the first steps compile loops
    taken = take_turns(
        steps, rounds=rounds, turn_seconds=seconds, wait=lambda: None, tell=lambda _: None
    )
    share = CASES[FLOOR].bytes_per_parameter / one.bytes
    return spread([share * second for second in taken["ours"]], taken["floor"])


@click.command()
@click.option("--threads", default=1, show_default=True, help="Threads of torch.")
@click.option("--rounds", default=9, show_default=True, help="Turns of each contestant.")
@click.option("--seconds", default=0.2, show_default=True, help="How long a turn is at least.")
@click.option("--tiny", is_flag=True, help="A few small tensors, to see that it runs.")
def main(threads: int, rounds: int, seconds: float, *, tiny: bool) -> None:
    """Print a table: the time per byte of our step by the floor's, median (least to greatest)."""
    torch.set_num_threads(threads)
    shapes = TINY if tiny else SHAPES
    head = f"{threads} thread{'s' * (threads > 1)}"
    click.echo(f"| {head} | bytes per parameter | {' | '.join(shapes)} |")
    click.echo("| " + " | ".join(["---"] * (2 + len(shapes))) + " |")
    for name, one in ALGORITHMS.items():
        cells = [str(measured(one, own, threads, rounds, seconds)) for own in shapes.values()]
        click.echo(f"| {name} | {one.bytes} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
