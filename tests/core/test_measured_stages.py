"""Measured stages, which need a sum over all gradients, and which parts of a tree can share."""

from typing import Any

import pytest
import torch

from functional_optim import (
    Optimizer,
    chain,
    clip_by_global_norm,
    clip_by_value,
    decoupled_weight_decay,
    rmsprop,
    sgd,
)
from tests.choices import each_value

from .scenarios import assert_totals_are_taken_in_turn
from .support import CHAINS, IN_PYTHON, Frozen, refused, step

CLIPPED = chain(clip_by_global_norm(1.0), sgd(1.0))


def exact(seed: int) -> dict[str, Any]:
    """Return gradients with integer norms, whose squares add up exactly in any order."""
    a, b, c = (torch.tensor(1.0 + seed * prime % 9).double() for prime in (5, 7, 11))
    return {
        "a": a * torch.tensor([[3.0, -4.0], [0.0, 12.0], [0.0, 0.0]]),
        "b": b * torch.tensor([1.0, -1.0, 1.0, 1.0]),
        "c": -c,
        "d": torch.zeros(0).double(),
    }


def test_measure_is_the_sum_of_squares() -> None:
    """Missing gradients add nothing, and the measurement changes nothing."""
    grads = exact(0)
    state = CLIPPED.init(grads)
    frozen = Frozen(grads, state)
    total = CLIPPED.measure(grads, grads, state)
    assert (total.dtype, total.shape) == (torch.float64, ())
    assert total.item() == sum(grad.square().sum().item() for grad in grads.values())
    rest = CLIPPED.measure(grads, {**grads, "a": None}, state)
    assert total - rest == grads["a"].square().sum()
    assert CLIPPED.measure(grads, dict.fromkeys(grads), state).item() == 0.0
    frozen.assert_untouched()


@each_value(optimizer=CHAINS, executor=IN_PYTHON)
def test_every_measured_stage_takes_its_own_total(optimizer: Optimizer, executor: Any) -> None:
    assert_totals_are_taken_in_turn(optimizer.using(executor=executor))


def test_the_second_total_is_of_what_the_first_stage_made() -> None:
    optimizer = chain(clip_by_value(1.0), clip_by_global_norm(9.0), clip_by_global_norm(1.0), sgd())
    grads = [torch.tensor([3.0]), torch.tensor([0.5])]
    state = optimizer.init(grads)
    assert optimizer.measure(grads, grads, state).item() == 1.25
    shrunk = optimizer.measure(grads, grads, state, measured=[torch.tensor(81.0 * 4).double()])
    assert shrunk.item() == pytest.approx(1.25 / 4, rel=1e-6)


def test_each_stage_scales_by_its_own_total() -> None:
    """The first stage does not clip a norm of 5; the last clips the result of the value clip."""
    optimizer = chain(
        clip_by_global_norm(9.0), clip_by_value(3.5), clip_by_global_norm(2.0), sgd(1.0)
    )
    params = [torch.zeros(1).double(), torch.zeros(1).double()]
    grads = [torch.full((1,), 3.0).double(), torch.full((1,), 4.0).double()]
    norm = (3.0**2 + 3.5**2) ** 0.5
    for new, clipped in zip(step(optimizer, params, grads), (3.0, 3.5), strict=True):
        assert new.item() == pytest.approx(-clipped * 2.0 / (norm + 1e-6), rel=1e-14)


def test_a_rule_before_the_measured_stage_is_seen_by_it() -> None:
    """The weight decay reads the parameter after the decoupled decay has shrunk it."""
    optimizer = CHAINS["clipped behind a decay"]
    param, grad = torch.ones(1).double(), torch.zeros(1).double()
    total = optimizer.measure(param, grad, optimizer.init(param))
    assert total.item() == pytest.approx((0.2 * (1 - 0.1 * 0.3)) ** 2, rel=1e-12)


def test_a_derivative_goes_through_the_norm() -> None:
    """The clipped gradient always has length one, so its derivative is tangential."""
    grad = torch.tensor([3.0, 4.0], dtype=torch.float64, requires_grad=True)
    param = torch.zeros(2, dtype=torch.float64)
    (slope,) = torch.autograd.grad(step(CLIPPED, param, grad).norm(), grad)
    assert slope.norm() < 1e-6
    (slope,) = torch.autograd.grad(step(CLIPPED, param, grad)[0], grad)
    torch.testing.assert_close(slope, torch.tensor([-0.128, 0.096]).double(), rtol=1e-6, atol=0)


def test_totals_that_nobody_takes_or_nobody_can_give_are_refused() -> None:
    param, total = torch.ones(1), torch.ones((), dtype=torch.float64)
    for optimizer in (sgd(), chain(decoupled_weight_decay(0.1), rmsprop())):
        with pytest.raises(ValueError, match="the chain has no such stage"):
            optimizer.measure(param, param, optimizer.init(param))
    with pytest.raises(ValueError, match="at most 0 totals if one more is to be computed, got 1"):
        CLIPPED.measure(param, param, CLIPPED.init(param), measured=[total])
    misused: list[tuple[Optimizer, list[Any], type[Exception]]] = [
        (sgd(), [total], ValueError),
        (CLIPPED, [total] * 2, ValueError),
        (CLIPPED, [25.0], TypeError),
        (CLIPPED, [torch.ones(1)], TypeError),
    ]
    for optimizer, totals, error in misused:
        for way in (optimizer.update, optimizer.update_):
            with refused(error, "measured", optimizer=optimizer, totals=totals, way=way):
                way(param, param, optimizer.init(param), measured=totals)
    assert param.item() == 1.0
