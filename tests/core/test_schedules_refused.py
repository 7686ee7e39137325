"""Arguments that make no schedule, and errors that say what to write instead."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from functional_optim import (
    adamw,
    constant,
    cosine,
    exponential,
    inverse_sqrt,
    joined,
    linear,
    on_global_step,
    one_cycle,
    polynomial,
    warmup,
    warmup_stable_decay,
)
from tests.choices import case

REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: constant(math.nan), ValueError, "constant: value must be a finite number, got nan"),
    (lambda: constant(10**400), ValueError, "finite number"),
    (lambda: constant(True), TypeError, "must be a number, got True"),
    (lambda: constant(torch.tensor(0.1)), TypeError, "write a function of the step"),
    (lambda: linear("0.1", to=0.0, steps=5), TypeError, "linear: start must be a number"),
    (lambda: linear(0.1, to=math.inf, steps=5), ValueError, "linear: to must be a finite"),
    (lambda: cosine(0.1, steps=0), ValueError, "cosine: steps must be a whole number >= 1, got 0"),
    (lambda: cosine(0.1, steps=5.0), TypeError, "whole number >= 1, got 5.0"),
    (lambda: cosine(0.1, steps=True), TypeError, "whole number >= 1, got True"),
    (lambda: polynomial(0.1, steps=5, power=0.0), ValueError, "power must be a finite number > 0"),
    (lambda: exponential(0.1, gamma=-1.0), ValueError, "gamma must be a finite number > 0"),
    (lambda: inverse_sqrt(0.1, steps=0), ValueError, "steps must be a whole number >= 1"),
    (lambda: joined([], []), TypeError, "must be a list of schedules, got []"),
    (lambda: joined(constant(1.0), []), TypeError, "must be a list of schedules"),
    (lambda: joined([constant(1.0)], [5]), ValueError, r"a list of 0 whole numbers.*got [5]"),
    (lambda: joined([math.cos, 0.1], [5]), TypeError, r"schedules[1] must be a schedule"),
    (lambda: joined([math.cos] * 3, [5, 5]), ValueError, r"boundaries[1] must be a whole number"),
    (lambda: joined([math.cos] * 2, [0]), ValueError, r"boundaries[0] must be .* >= 1, got 0"),
    (lambda: warmup(-1, then=math.cos), ValueError, "warmup: steps must be a whole number >= 0"),
    (lambda: warmup(5, then=0.1), TypeError, "write constant(number)"),
    (lambda: warmup(5, then=torch.ones(())), TypeError, "warmup: then must be a schedule"),
    (lambda: warmup(5, then=math.cos, start=math.nan), ValueError, "warmup: start must be"),
    (
        lambda: warmup_stable_decay(0.1, warmup=1, stable=1, decay=0),
        ValueError,
        "decay must be a whole number >= 1",
    ),
    (
        lambda: warmup_stable_decay(0.1, warmup=1, stable=-1, decay=1),
        ValueError,
        "stable must be a whole number >= 0",
    ),
    (lambda: one_cycle(0.1, steps=2), ValueError, "steps must be a whole number >= 3"),
    (lambda: one_cycle(0.1, steps=9, anneal_strategy="cosine"), ValueError, "'cos' or 'linear'"),
    (lambda: one_cycle(0.1, steps=9, pct_start=0.1), ValueError, "pct_start must be > 1 / steps"),
    (lambda: one_cycle(0.1, steps=9, pct_start=1.0), ValueError, "got 1.0 of 9 steps"),
    (
        lambda: one_cycle(0.1, steps=9, pct_start=0.6, three_phase=True),
        ValueError,
        "<= 0.5 with three_phase",
    ),
    (lambda: one_cycle(0.1, steps=9, three_phase=1), TypeError, "True or False, got 1"),
    (lambda: one_cycle(0.1, steps=9, div_factor=0.0), ValueError, "div_factor must be"),
    (lambda: on_global_step(0.1), TypeError, "on_global_step: schedule must be a schedule"),
    (lambda: on_global_step(on_global_step(math.cos)), TypeError, "is marked already"),
]


def test_what_makes_no_schedule_is_refused() -> None:
    for make, error, message in REFUSED:
        with case(message=message), pytest.raises(error) as caught:
            make()
        parts = message.split(".*")
        assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_nothing_times_what_is_too_large_is_nothing() -> None:
    for made in (0.0, 2000.0, torch.tensor(2000)):
        assert float(exponential(0.0, gamma=2.0)(made)) == 0.0


def test_a_rise_without_an_end_is_refused_by_who_takes_it() -> None:
    one = exponential(0.1, gamma=2.0)
    assert one(5000.0) == math.inf
    optimizer, param = adamw(one), torch.ones(2)
    state = optimizer.init(param)
    leaves = state.leaves._replace(step=torch.tensor(5000))
    with pytest.raises(ValueError, match=r"lr \(from its schedule\) must be a finite .* got inf"):
        optimizer.update(param, torch.ones(2), state._replace(leaves=leaves))
