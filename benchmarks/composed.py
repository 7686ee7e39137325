"""Composed optimizers and handwritten ones, compared: ``python -m benchmarks.composed``.

Contestants take turns: see :mod:`benchmarks.timing`. A ratio is the time of a step of
``TorchOptimizer`` divided by the peer's, within a round. The goal is a ratio of at most 1. The peer
is the authors' package if one exists, and otherwise what users write around torch's fastest class.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import click
import prodigyopt
import schedulefree
import torch
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim.swa_utils import get_ema_multi_avg_fn

from benchmarks.ratios import Spread, spread
from benchmarks.timing import Step, take_turns
from functional_optim import (
    Optimizer,
    TorchOptimizer,
    accumulate,
    adamw,
    apply_if_finite,
    chain,
    clip_by_global_norm,
    ema,
    labels,
    lamb,
    partition,
    prodigy,
    schedule_free_adamw,
    sgd,
    with_shape,
)

Params = Sequence[Parameter]
Shapes = Sequence[tuple[int, ...]]

WIDTH = 384
BLOCK: tuple[tuple[int, ...], ...] = (
    *((WIDTH,), (WIDTH,), (3 * WIDTH, WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,)),
    *((WIDTH,), (WIDTH,), (4 * WIDTH, WIDTH), (4 * WIDTH,), (WIDTH, 4 * WIDTH), (WIDTH,)),
)
SHAPES: Mapping[str, Shapes] = {
    "3 x 100": ((100,),) * 3,
    "100 x (10, 10)": ((10, 10),) * 100,
    "GPT, 6 layers of 384": (*BLOCK * 6, (8192, WIDTH), (256, WIDTH), (WIDTH,), (WIDTH,)),
}
"""Tensors that one optimizer steps, by name."""

TINY: Mapping[str, Shapes] = {"2 x (2, 3)": ((2, 3),) * 2}

LR = 1e-4


def fused(params: Params) -> torch.optim.Optimizer:
    """Return torch's fastest AdamW."""
    return torch.optim.AdamW(params, lr=LR, fused=True)


def with_ema(params: Params) -> Step:
    """Average the weights with ``torch.optim.swa_utils``, for all parameters at once."""
    optimizer, averages = fused(params), [one.detach().clone() for one in params]
    average = get_ema_multi_avg_fn(0.99)

    def step() -> None:
        optimizer.step()
        average(averages, [one.detach() for one in params], 1)

    return step


def clipped(params: Params) -> Step:
    optimizer = fused(params)

    def step() -> None:
        clip_grad_norm_(params, 1.0)
        optimizer.step()

    return step


def if_finite(params: Params) -> Step:
    """Step only if the norm of all gradients is finite."""
    optimizer = fused(params)

    def step() -> None:
        if get_total_norm([one.grad for one in params if one.grad is not None]).isfinite():
            optimizer.step()

    return step


def every_fourth(params: Params) -> Step:
    """Make one step for four batches. Their gradients are added up in ``.grad`` and divided."""
    optimizer, calls = fused(params), 0
    given = [one.grad for one in params if one.grad is not None]
    own = [torch.zeros_like(one) for one in given]
    for param, total in zip(params, own, strict=True):
        param.grad = total

    def step() -> None:
        nonlocal calls
        calls += 1
        torch._foreach_add_(own, given)  # as autograd does
        if calls % 4 == 0:
            torch._foreach_div_(own, 4.0)
            optimizer.step()
            torch._foreach_zero_(own)

    return step


def in_parts(params: Params) -> Step:
    """Step matrices and other parameters with two optimizers."""
    matrices = [one for one in params if one.dim() == 2]
    rest = [one for one in params if one.dim() != 2]
    parts = [fused(matrices)] if matrices else []
    parts += [torch.optim.SGD(rest, lr=LR, momentum=0.9, fused=True)] if rest else []
    return lambda: [one.step() for one in parts]


def schedule_free(params: Params) -> Step:
    optimizer = schedulefree.AdamWScheduleFree(params, lr=LR, foreach=True)
    optimizer.train()
    step: Step = optimizer.step
    return step


def lamb_in_a_loop(params: Params) -> Step:
    """Return LAMB as users write it: a loop over parameters, in place if possible."""
    first, second = ([torch.zeros_like(one) for one in params] for _ in range(2))
    calls = 0

    @torch.no_grad()
    def step() -> None:
        nonlocal calls
        calls += 1
        corrected, root = 1 - 0.9**calls, (1 - 0.999**calls) ** 0.5
        for param, average, square in zip(params, first, second, strict=True):
            assert param.grad is not None
            average.lerp_(param.grad, 1 - 0.9)
            square.mul_(0.999).addcmul_(param.grad, param.grad, value=1 - 0.999)
            way = (average / corrected).div_((square.sqrt() / root).add_(1e-6))
            way.add_(param, alpha=0.01)
            own, others = param.norm(), way.norm()
            ratio = torch.where((own > 0) & (others > 0), own / others, 1.0)
            param.add_(way.mul_(ratio), alpha=-LR)

    return step


class Pair(NamedTuple):
    """Optimizer of this package, and its peer."""

    ours: Callable[[], Optimizer]
    theirs: Callable[[Params], Step]
    peer: str


def _in_two() -> Optimizer:
    matrices = labels({"matrices": with_shape(ndim=2)}, default="rest")
    return partition({"matrices": adamw(LR), "rest": sgd(LR, momentum=0.9)}, matrices)


def _by_package(params: Params) -> Step:
    step: Step = prodigyopt.Prodigy(params, growth_rate=1.0001).step
    return step


PAIRS: Mapping[str, Pair] = {
    "clip + AdamW": Pair(
        lambda: chain(clip_by_global_norm(1.0), adamw(LR)), clipped, "clip_grad_norm_, fused AdamW"
    ),
    "accumulate(4) + AdamW": Pair(
        lambda: chain(accumulate(4), adamw(LR)), every_fourth, "by hand, fused AdamW"
    ),
    "apply_if_finite + AdamW": Pair(
        lambda: chain(apply_if_finite(9), adamw(LR)), if_finite, "get_total_norm, fused AdamW"
    ),
    "AdamW + ema": Pair(lambda: chain(adamw(LR), ema(0.99)), with_ema, "fused AdamW, swa_utils"),
    "partition of AdamW and SGD": Pair(_in_two, in_parts, "two optimizers, fused"),
    "schedule-free AdamW": Pair(
        lambda: schedule_free_adamw(LR), schedule_free, "schedulefree, foreach"
    ),
    # The gradients are the same at each step, so d grows unless growth_rate limits it.
    "Prodigy": Pair(lambda: prodigy(growth_rate=1.0001), _by_package, "prodigyopt"),
    "LAMB": Pair(lambda: lamb(LR), lamb_in_a_loop, "by hand, in a loop"),
}


def _params(shapes: Shapes) -> list[Parameter]:
    draws = torch.Generator().manual_seed(0)
    made = [Parameter(torch.randn(shape, generator=draws)) for shape in shapes]
    for one in made:
        one.grad = torch.randn(one.shape, generator=draws)
    return made


def contestants(pair: Pair, shapes: Shapes) -> tuple[dict[str, Step], list[list[Parameter]]]:
    """Return the steps of ours and of the peer, and their parameters, which start equal."""
    ours, theirs = _params(shapes), _params(shapes)
    steps = {"ours": TorchOptimizer(ours, pair.ours()).step, "theirs": pair.theirs(theirs)}
    return steps, [ours, theirs]


def measured(pair: Pair, shapes: Shapes, rounds: int, turn_seconds: float) -> Spread:
    """Return the time of our step divided by the peer's."""
    steps, _ = contestants(pair, shapes)
    for step in [*steps.values()] * 20:
        step()  # the first steps compile and plan; they are not timed
    seconds = take_turns(
        steps, rounds=rounds, turn_seconds=turn_seconds, wait=lambda: None, tell=lambda _: None
    )
    return spread(seconds["ours"], seconds["theirs"])


def _cell(found: Spread) -> str:
    return f"{found} **MISSED**" if found.median > 1.0 else str(found)


@click.command()
@click.option("--threads", default=1, show_default=True, help="Threads of torch.")
@click.option("--rounds", default=9, show_default=True, help="Turns of each contestant.")
@click.option("--seconds", default=0.2, show_default=True, help="How long a turn is at least.")
@click.option("--tiny", is_flag=True, help="A few small tensors, to see that it runs.")
def main(threads: int, rounds: int, seconds: float, *, tiny: bool) -> None:
    """Print a table: the time of our step by the peer's, median (least to greatest)."""
    torch.set_num_threads(threads)
    shapes = TINY if tiny else SHAPES
    click.echo(f"| {threads} thread{'s' * (threads > 1)} | peer | {' | '.join(shapes)} |")
    click.echo("| " + " | ".join(["---"] * (2 + len(shapes))) + " |")
    for name, pair in PAIRS.items():
        measure = partial(measured, pair, rounds=rounds, turn_seconds=seconds)
        cells = [_cell(measure(one)) for one in shapes.values()]
        click.echo(f"| {name} | {pair.peer} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
