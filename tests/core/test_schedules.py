"""Schedules: pure functions of the number of steps a leaf has made, 0 at its first step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from functional_optim import (
    Optimizer,
    adagrad,
    adam,
    adamw,
    chain,
    clip_by_global_norm,
    clip_by_value,
    decoupled_weight_decay,
    rprop,
    sgd,
)

from .support import assert_same, noise

GRADS = [noise(index + 1, 3) for index in range(4)]


def _run(optimizer: Optimizer, hypers: list[dict[str, Any]] | None = None) -> list[Any]:
    """Params after each of four steps, with other hyper-parameters at each if given."""
    param, state, seen = noise(0, 3), optimizer.init(noise(0, 3)), []
    for index, grad in enumerate(GRADS):
        hyper = hypers[index] if hypers else {}
        param, state = optimizer.update(param, grad, state, **hyper)
        seen.append(param)
    return seen


def test_a_schedule_is_given_the_steps_made_so_far() -> None:
    asked: list[Any] = []

    def rate(made: float) -> float:
        asked.append(made)
        return 0.1

    _run(sgd(rate))
    assert asked == [0, 1, 2, 3]


@pytest.mark.parametrize("executor", ["reference", "script"])
def test_a_schedule_equals_its_values_given_step_by_step(executor: Any) -> None:
    scheduled = adamw(lr=lambda made: 0.1 / (1 + made)).using(executor=executor)
    given = [{"lr": 0.1 / (1 + made)} for made in range(4)]
    assert_same(_run(scheduled), _run(adamw(), given))


def test_a_schedule_is_inherited_with_the_lr() -> None:
    optimizer = chain(decoupled_weight_decay(0.3), sgd(lambda made: 0.1 * (made + 1)))
    given = [{"lr": 0.1 * (made + 1)} for made in range(4)]
    assert_same(_run(optimizer), _run(chain(decoupled_weight_decay(0.3), sgd()), given))


def test_a_schedule_inside_a_tuple() -> None:
    optimizer = adam(0.1, betas=(lambda made: 0.5 + made / 10, 0.9))
    given = [{"betas": (0.5 + made / 10, 0.9)} for made in range(4)]
    assert_same(_run(optimizer), _run(adam(0.1), given))


def test_a_schedule_of_a_whole_tuple() -> None:
    optimizer = adam(0.1, betas=lambda made: (0.5 + made / 10, 0.9))
    given = [{"betas": (0.5 + made / 10, 0.9)} for made in range(4)]
    assert_same(_run(optimizer), _run(adam(0.1), given))


def test_a_schedule_of_a_transform() -> None:
    optimizer = chain(clip_by_value(lambda made: 0.2 * (made + 1)), sgd(1.0))
    given = [{"clip_value": 0.2 * (made + 1)} for made in range(4)]
    assert_same(_run(optimizer), _run(chain(clip_by_value(9.0), sgd(1.0)), given))
    optimizer = chain(clip_by_global_norm(lambda made: 0.2 * (made + 1)), sgd(1.0))
    given = [{"max_norm": 0.2 * (made + 1)} for made in range(4)]
    assert_same(_run(optimizer), _run(chain(clip_by_global_norm(9.0), sgd(1.0)), given))


def test_a_schedule_may_return_a_tensor() -> None:
    optimizer = adam(lr=lambda made: torch.tensor(0.1, dtype=torch.float64) / (1 + made))
    given = [{"lr": torch.tensor(0.1, dtype=torch.float64) / (1 + made)} for made in range(4)]
    assert_same(_run(optimizer), _run(adam(), given))


def test_each_leaf_follows_its_own_count() -> None:
    optimizer = sgd(lr=lambda made: 10.0**made)
    params = {"a": torch.zeros(1), "b": torch.zeros(1)}
    state = optimizer.init(params)
    for index in range(3):
        grads = {"a": torch.ones(1), "b": torch.ones(1) if index == 2 else None}
        params, state = optimizer.update(params, grads, state)
    assert params["a"].item() == -111.0
    assert params["b"].item() == -1.0


def test_replace_and_override_take_schedules() -> None:
    optimizer = sgd(1.0).override(("b",), lr=lambda made: 2.0 + made)
    params = {"a": torch.zeros(1), "b": torch.zeros(1)}
    state = optimizer.init(params)
    for _ in range(2):
        params, state = optimizer.update(params, {k: torch.ones(1) for k in params}, state)
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


@pytest.mark.parametrize(("schedule", "error", "message"), BAD)
def test_what_a_schedule_returns_is_checked(
    schedule: Callable[[Any], Any], error: type[Exception], message: str
) -> None:
    optimizer = sgd(schedule)
    with pytest.raises(error) as caught:
        _run(optimizer)
    assert str(caught.value).startswith("sgd: lr (from its schedule)")
    assert message in str(caught.value)


def test_a_value_that_goes_out_of_bounds_later_is_refused_later() -> None:
    optimizer = sgd(lambda made: 1.0 - made)
    param, state = noise(0, 3), optimizer.init(noise(0, 3))
    for grad in GRADS[:2]:
        param, state = optimizer.update(param, grad, state)
    with pytest.raises(ValueError, match="must be a finite number >= 0, got -1"):
        optimizer.update(param, GRADS[2], state)


def test_scheduled_tuples_are_checked_item_by_item() -> None:
    with pytest.raises(ValueError, match=r"betas\[1\].*got 1.0"):
        _run(adam(betas=(0.9, lambda made: 1.0)))
    with pytest.raises(TypeError, match=r"betas .* must be a tuple of 2 numbers"):
        _run(adam(betas=lambda made: 0.9))


def test_contradictions_between_scheduled_values_are_found() -> None:
    with pytest.raises(ValueError, match="nesterov needs momentum > 0"):
        _run(sgd(momentum=lambda made: 0.0, nesterov=True))
    with pytest.raises(ValueError, match="rprop: etas must satisfy"):
        _run(rprop(etas=(0.5, lambda made: 0.7)))


@dataclass
class Linear:
    """A schedule with parameters of its own, as one writes it: comparable, so not hashable."""

    start: float

    def __call__(self, made: float) -> float:
        return self.start * (made + 1)


def test_a_schedule_need_not_be_hashable() -> None:
    given = [{"lr": 0.1 * (made + 1)} for made in range(4)]
    assert_same(_run(adam(Linear(0.1))), _run(adam(), given))


@pytest.mark.parametrize(
    ("scheduled", "plain"),
    [
        (adagrad(0.1, initial_accumulator_value=lambda made: 0.3 + made), adagrad(0.1, 0, 0, 0.3)),
        (rprop(lambda made: 0.3 + made), rprop(0.3)),
    ],
)
def test_init_takes_the_first_value_of_a_schedule(scheduled: Optimizer, plain: Optimizer) -> None:
    assert_same(scheduled.init(noise(0, 3)), plain.init(noise(0, 3)))


@pytest.mark.parametrize("make", [adam, adamw])
def test_a_fixed_choice_takes_no_schedule(make: Callable[..., Optimizer]) -> None:
    with pytest.raises(TypeError, match="amsgrad must be True or False"):
        make(amsgrad=lambda made: False)
    with pytest.raises(TypeError, match="maximize must be True or False"):
        make(maximize=lambda made: False)
