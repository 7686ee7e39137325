"""Schedulers of torch.optim to compare our schedules with, and the values of both."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import lr_scheduler

from functional_optim import (
    constant,
    cosine,
    exponential,
    inverse_sqrt,
    joined,
    linear,
    one_cycle,
    polynomial,
    warmup,
    warmup_stable_decay,
)
from functional_optim.core.schedule_value import ScheduleValue

STEPS = 1000
BASE = 0.1


class Twin(NamedTuple):
    """Schedule, and the equivalent scheduler of torch.optim."""

    schedule: ScheduleValue
    scheduler: str
    """The name of torch's class."""
    make: Callable[[Any], Any]
    """Constructor of the scheduler, for an optimizer whose lr is :data:`BASE`."""
    steps: int = STEPS


def _sequence(optimizer: Any, milestones: list[int], *made: Callable[[Any], Any]) -> Any:
    schedulers = [one(optimizer) for one in made]
    return lr_scheduler.SequentialLR(optimizer, schedulers, milestones)


def _rise(optimizer: Any, steps: int = 100) -> Any:
    return lr_scheduler.LinearLR(optimizer, 0.25, 1.0, total_iters=steps)


def _factor(optimizer: Any, factor: float = 1.0) -> Any:
    return lr_scheduler.ConstantLR(optimizer, factor, total_iters=STEPS + 1)


TWINS: dict[str, Twin] = {
    "constant": Twin(constant(BASE), "ConstantLR", _factor),
    "linear": Twin(
        linear(BASE / 3, to=BASE * 0.7, steps=700),
        "LinearLR",
        lambda one: lr_scheduler.LinearLR(one, 1 / 3, 0.7, total_iters=700),
    ),
    "linear to 0": Twin(
        linear(BASE, to=0.0, steps=STEPS),
        "LinearLR",
        lambda one: lr_scheduler.LinearLR(one, 1.0, 0.0, total_iters=STEPS),
    ),
    "cosine": Twin(
        cosine(BASE, to=0.013, steps=STEPS),
        "CosineAnnealingLR",
        lambda one: lr_scheduler.CosineAnnealingLR(one, STEPS, eta_min=0.013),
    ),
    "cosine to 0": Twin(
        cosine(BASE, steps=STEPS),
        "CosineAnnealingLR",
        lambda one: lr_scheduler.CosineAnnealingLR(one, STEPS),
    ),
    "polynomial": Twin(
        polynomial(BASE, steps=700, power=2.5),
        "PolynomialLR",
        lambda one: lr_scheduler.PolynomialLR(one, 700, power=2.5),
    ),
    "exponential": Twin(
        exponential(BASE, gamma=0.995),
        "ExponentialLR",
        lambda one: lr_scheduler.ExponentialLR(one, 0.995),
    ),
    "inverse_sqrt": Twin(
        inverse_sqrt(BASE, steps=70),
        "LambdaLR",
        lambda one: lr_scheduler.LambdaLR(one, lambda n: (70 / (70 + n)) ** 0.5),
    ),
    "joined": Twin(
        joined(
            [constant(BASE / 2), exponential(BASE, gamma=0.99), cosine(BASE, steps=500)], [200, 600]
        ),
        "SequentialLR",
        lambda one: _sequence(
            one,
            [200, 600],
            lambda one: _factor(one, 0.5),
            lambda one: lr_scheduler.ExponentialLR(one, 0.99),
            lambda one: lr_scheduler.CosineAnnealingLR(one, 500),
        ),
    ),
    "warmup": Twin(
        warmup(100, then=cosine(BASE, steps=900), start=BASE / 4),
        "SequentialLR",
        lambda one: _sequence(
            one, [100], _rise, lambda one: lr_scheduler.CosineAnnealingLR(one, 900)
        ),
    ),
    "warmup_stable_decay": Twin(
        warmup_stable_decay(BASE, warmup=100, stable=600, decay=300, start=BASE / 4),
        "SequentialLR",
        lambda one: _sequence(
            one,
            [100, 700],
            _rise,
            _factor,
            lambda one: lr_scheduler.LinearLR(one, 1.0, 0.0, total_iters=300),
        ),
    ),
}
TWINS |= {
    f"one_cycle{' in three phases' if three else ''}{' in lines' if way == 'linear' else ''}": Twin(
        one_cycle(0.3, steps=777, pct_start=0.31, anneal_strategy=way, three_phase=three),
        "OneCycleLR",
        lambda one, way=way, three=three: lr_scheduler.OneCycleLR(
            one,
            0.3,
            total_steps=777,
            pct_start=0.31,
            anneal_strategy=way,
            three_phase=three,
            cycle_momentum=False,
        ),
        776,  # OneCycleLR raises in later steps
    )
    for three in (False, True)
    for way in ("cos", "linear")
}
"""Twins, keyed by the constructor of the schedule and its special options."""


def values(twin: Twin) -> list[float]:
    """Return the values of our schedule before each step."""
    return [twin.schedule(float(made)) for made in range(twin.steps + 1)]


def _begun(twin: Twin) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=BASE)
    return optimizer, twin.make(optimizer)


def stepped(twin: Twin) -> list[float]:
    """Return the values of torch's scheduler after each step.

    Most classes compute a value from the one before.
    """
    optimizer, scheduler = _begun(twin)
    found = [optimizer.param_groups[0]["lr"]]
    for _ in range(twin.steps):
        optimizer.step()
        scheduler.step()
        found.append(optimizer.param_groups[0]["lr"])
    return found


def closed(twin: Twin) -> list[float] | None:
    """Return the values of torch's formula for any step, or None if the class has none."""
    _, scheduler = _begun(twin)
    formula = getattr(scheduler, "_get_closed_form_lr", None)
    if formula is None:
        return None
    found = []
    for made in range(twin.steps + 1):
        scheduler.last_epoch = made
        found.append(formula()[0])
    return found


def distance(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the largest difference, in units in the last place of the largest value."""
    unit = math.ulp(max(map(abs, ours)))
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / unit
