"""The stack of the NanoGPT speedrun's optimizer track as one chain, beside tuned AdamW and Muon.

The direction of SOAP or NorMuon steps the matrices of the blocks, with cautious decay and a control
of the norms of rows. AdamW steps all other parameters. The scores are those of the average of the
parameters over the tail of the run.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import functional_optim as fo
from benchmarks.training.contestants import label
from benchmarks.training.run import Result, best_rate, judged
from benchmarks.training.tasks import Params, Task, transformer_of
from functional_optim import Optimizer, Rule, Transform, cosine, warmup
from functional_optim.core.hyper import Schedule

MODEL = {"context": 32, "width": 64, "heads": 4, "blocks": 2}
STEPS = 300
TASK = Task(
    "Stack",
    "the demo's transformer, two blocks of width 64",
    lambda seed: transformer_of(seed, MODEL, 16),
    STEPS,
    2.3,
    (1e-3, 3e-3, 1e-2, 3e-2, 0.1),
    "held-out loss",
    logarithmic=False,
)
REST_RATE = 3e-3
"""Peak of AdamW's rate for vectors and embeddings. It is the best rate for AdamW alone."""
DECAY = 0.1
TAIL = 0.95
"""Decay of the average, which begins after two thirds of the run."""


def falling(rate: float) -> Schedule:
    """Return a rate that rises for a tenth of the run, and then falls along a cosine."""
    rise = STEPS // 10
    return warmup(rise, then=cosine(rate, to=0.1 * rate, steps=STEPS - rise), start=rate / rise)


def rest() -> Optimizer:
    """Return the optimizer of all parameters except the matrices of the blocks."""
    return fo.adamw(lr=falling(REST_RATE), betas=(0.9, 0.99))


def tuned_adamw(rate: float) -> Optimizer:
    """Return AdamW for all parameters."""
    return fo.adamw(lr=falling(rate), betas=(0.9, 0.99), weight_decay=DECAY)


def tuned_muon(rate: float) -> Optimizer:
    """Return Muon for the matrices of the blocks, in steps of AdamW's size."""
    muon = fo.muon(lr=falling(rate), weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
    return fo.partition({"matrices": muon, "rest": rest()}, label)


def stacked(direction: Any, rate: float) -> Optimizer:
    """Return the whole stack around a direction for matrices."""
    part: dict[str, Callable[..., Any]] = {name: getattr(fo, name) for name in NEEDED}
    matrices = fo.chain(
        direction,
        part["cautious_weight_decay"](DECAY),
        fo.descend(lr=falling(rate)),
        part["constrain_norm"](rows=True),
    )
    both = fo.partition({"matrices": matrices, "rest": rest()}, label)
    return fo.chain(both, part["tail_ema"](TAIL, start=2 * STEPS // 3))


def direction_of(rule: Rule) -> Transform:
    """Return the update of a rule as a transform: its step of length 1 from 0, without the sign."""

    def transform(grad: Tensor, param: Tensor, state: Any, c: Any) -> tuple[Tensor, Any]:
        made, state = rule.rule(torch.zeros_like(param), grad, state, c)
        return -made, state

    return Transform(
        name=f"scale_by_{rule.name}",
        hyper=rule.hyper,
        state=rule.state,
        init=rule.init,
        coefficients=rule.coefficients,
        transform=transform,
        bounds=rule.bounds,
        kind=rule.kind,
    )


def stack_of(algorithm: str, options: dict[str, Any], rate: float) -> Optimizer:
    """Return the stack around an algorithm of this package that is one rule."""
    made = getattr(fo, algorithm)(lr=1.0, weight_decay=0.0, **options)
    (link,) = [one for one in made.links if one.stage.name == algorithm]
    return stacked(direction_of(link.stage)(**link.hyper._asdict()), rate)


NEEDED = ("cautious_weight_decay", "constrain_norm", "tail_ema")


def stacks() -> dict[str, Callable[[float], Optimizer]]:
    """Return all stacks that can be built from the names that the package has."""
    found: dict[str, Callable[[float], Optimizer]] = {
        "tuned AdamW": tuned_adamw,
        "tuned Muon": tuned_muon,
    }
    if all(hasattr(fo, one) for one in NEEDED):
        if hasattr(fo, "normuon"):
            options = {"adjust_lr_fn": "match_rms_adamw"}
            found["NorMuon stack"] = functools.partial(stack_of, "normuon", options)
        found["SOAP stack"] = functools.partial(stack_of, "soap", {})
    return found


def results_of_stack(name: str) -> dict[str, Result]:
    """Train one of the stacks, with the best of the learning rates."""
    torch.set_num_threads(1)
    made = stacks()[name]

    def build(rate: float | None, _: Params) -> Optimizer:
        return made(TASK.rates[0] if rate is None else rate)

    return {"stack": judged(build, TASK, best_rate(build, TASK))}
