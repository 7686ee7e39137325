"""Schedules: pure functions of the number of steps that a leaf has made, 0 at its first step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import (
    Optimizer,
    adagrad,
    adam,
    adamw,
    chain,
    clip_by_global_norm,
    clip_by_value,
    cosine,
    decoupled_weight_decay,
    exponential,
    inverse_sqrt,
    joined,
    one_cycle,
    rprop,
    sgd,
    warmup,
)
from functional_optim.kernels import ExecutorName
from tests.choices import each_value

from ..choices import case
from .support import IN_PYTHON, assert_same, noise

GRADS = [noise(index + 1, 3) for index in range(4)]
ONES = {"a": torch.ones(1), "b": torch.ones(1)}


def _run(optimizer: Optimizer, hyper: Callable[[int], dict[str, Any]] = lambda _: {}) -> list[Any]:
    """Return the parameters after each of four steps, with hyper-parameters for each step."""
    param, state, seen = noise(0, 3), optimizer.init(noise(0, 3)), []
    for index, grad in enumerate(GRADS):
        param, state = optimizer.update(param, grad, state, **hyper(index))
        seen.append(param)
    return seen


def falling(made: Any) -> Any:
    return 0.1 / (1 + made)


def rising(made: Any) -> Any:
    return 0.2 * (made + 1)


@dataclass
class Linear:
    """Schedule with parameters, as a user writes it: comparable, and so not hashable."""

    start: float

    def __call__(self, made: float) -> float:
        return self.start * (made + 1)


def first_beta(made: Any) -> Any:
    return 0.5 + made / 10


def in_tensor(made: Any) -> Tensor:
    return torch.tensor(0.1, dtype=torch.float64) / (1 + made)


RISING = warmup(2, then=inverse_sqrt(0.5, steps=3), start=0.1)
FALLING = joined([cosine(0.8, to=0.2, steps=2), exponential(0.1, gamma=0.5)], [2])
CYCLE = one_cycle(0.5, steps=4, pct_start=0.5, div_factor=0.5 / 0.9, final_div_factor=1.0)


def rates(made: float) -> dict[str, Any]:
    return {"lr": RISING(made), "weight_decay": FALLING(made)}


Scheduled = tuple[Optimizer, Optimizer, Callable[[int], dict[str, Any]]]
DECAYED = chain(decoupled_weight_decay(0.3), sgd())
VALUE, NORM = chain(clip_by_value(9.0), sgd(1.0)), chain(clip_by_global_norm(9.0), sgd(1.0))
SCHEDULED: list[Scheduled] = [
    (adamw(falling), adamw(), lambda made: {"lr": falling(made)}),
    (chain(decoupled_weight_decay(0.3), sgd(rising)), DECAYED, lambda made: {"lr": rising(made)}),
    (DECAYED.replace(lr=rising), DECAYED, lambda made: {"lr": rising(made)}),
    (adam(betas=(first_beta, 0.9)), adam(), lambda made: {"betas": (first_beta(made), 0.9)}),
    (
        adam(betas=lambda made: (first_beta(made), 0.9)),
        adam(),
        lambda made: {"betas": (first_beta(made), 0.9)},
    ),
    (VALUE.replace(clip_value=rising), VALUE, lambda made: {"clip_value": rising(made)}),
    (NORM.replace(max_norm=rising), NORM, lambda made: {"max_norm": rising(made)}),
    (adam(in_tensor), adam(), lambda made: {"lr": in_tensor(made)}),
    (adam(Linear(0.1)), adam(), lambda made: {"lr": 0.1 * (made + 1)}),
    (adamw(RISING, weight_decay=FALLING), adamw(), lambda made: rates(float(made))),
    (
        adam(betas=(CYCLE, FALLING), eps=RISING),
        adam(),
        lambda made: {"betas": (CYCLE(made), FALLING(made)), "eps": RISING(made)},
    ),
    (NORM.replace(max_norm=FALLING), NORM, lambda made: {"max_norm": FALLING(made)}),
]


@each_value(one=SCHEDULED, executor=IN_PYTHON)
def test_a_schedule_equals_its_values_given_step_by_step(
    one: Scheduled, executor: ExecutorName
) -> None:
    """A schedule gives one number, a number of a tuple, or a whole tuple, as numbers or tensors."""
    scheduled, plain, values = one
    assert_same(_run(scheduled.using(executor=executor)), _run(plain, values))


def test_a_schedule_is_given_the_steps_made_so_far() -> None:
    asked: list[Any] = []
    _run(sgd(lambda made: asked.append(made) or 0.1))
    assert asked == [0, 1, 2, 3]


def test_each_leaf_follows_its_own_count_and_schedule() -> None:
    optimizer = sgd(lambda made: 10.0**made)
    params = {"a": torch.zeros(1), "b": torch.zeros(1)}
    state = optimizer.init(params)
    for index in range(3):
        grads = {**ONES, **({} if index == 2 else {"b": None})}
        params, state = optimizer.update(params, grads, state)
    assert [params["a"].item(), params["b"].item()] == [-111.0, -1.0]
    optimizer = sgd(1.0).override(("b",), lr=lambda made: 2.0 + made)
    params = {"a": torch.zeros(1), "b": torch.zeros(1)}
    state = optimizer.init(params)
    for _ in range(2):
        params, state = optimizer.update(params, ONES, state)
    assert [params["a"].item(), params["b"].item()] == [-2.0, -5.0]


BAD: list[tuple[Callable[[Any], Any], type[Exception], str]] = [
    (lambda made: -0.5, ValueError, "got -0.5"),
    (lambda made: float("nan"), ValueError, "got nan"),
    (lambda made: float("inf"), ValueError, "got inf"),
    (lambda made: torch.tensor(-1.0), ValueError, "got -1.0"),
    (lambda made: torch.ones(2), ValueError, "shape (2,)"),
    (lambda made: "fast", TypeError, "got 'fast'"),
    (lambda made: None, TypeError, "got None"),
]


def test_what_a_schedule_returns_is_checked() -> None:
    for schedule, error, message in BAD:
        with case(message=message), pytest.raises(error) as caught:
            _run(sgd(schedule))
        assert str(caught.value).startswith("sgd: lr (from its schedule)")
        assert message in str(caught.value)
    with pytest.raises(ValueError, match=r"betas\[1\].*got 1.0"):
        _run(adam(betas=(0.9, lambda made: 1.0)))
    with pytest.raises(TypeError, match=r"betas .* must be a tuple of 2 numbers"):
        _run(adam(betas=lambda made: 0.9))


def test_a_value_that_goes_out_of_bounds_later_is_refused_later() -> None:
    optimizer = sgd(lambda made: 1.0 - made)
    param, state = noise(0, 3), optimizer.init(noise(0, 3))
    for grad in GRADS[:2]:
        param, state = optimizer.update(param, grad, state)
    with pytest.raises(ValueError, match="must be a finite number >= 0, got -1"):
        optimizer.update(param, GRADS[2], state)


def test_contradictions_between_scheduled_values_are_found() -> None:
    with pytest.raises(ValueError, match="nesterov needs momentum > 0"):
        _run(sgd(momentum=lambda made: 0.0, nesterov=True))
    with pytest.raises(ValueError, match="rprop: etas must satisfy"):
        _run(rprop(etas=(0.5, lambda made: 0.7)))


def test_init_takes_the_first_value_of_a_schedule() -> None:
    scheduled = adagrad(0.1, initial_accumulator_value=lambda made: 0.3 + made)
    assert_same(scheduled.init(noise(0, 3)), adagrad(0.1, 0, 0, 0.3).init(noise(0, 3)))
    assert_same(rprop(lambda made: 0.3 + made).init(noise(0, 3)), rprop(0.3).init(noise(0, 3)))
