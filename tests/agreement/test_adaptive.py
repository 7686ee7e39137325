"""Adaptive algorithms compared with their formulas in float64, and with other algorithms."""

from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import (
    Optimizer,
    adabelief,
    adabound,
    adagrad,
    adam,
    adamw,
    adan,
    ademamix,
    adopt,
    algorithms,
    laprop,
    qhadam,
    qhm,
    rmsprop,
    sgd,
    stable_adamw,
    yogi,
)
from tests.choices import case, pairs
from tests.core.support import noise, steps

from .formulas_adaptive import OPTIONS, run_formula

STEPS = 20
START = noise(0, 6)
GRADS = [noise(k + 1, 6) for k in range(STEPS)]
SHRINKING = [0.8**k * noise(k + 1, 6) for k in range(STEPS)]
"""Gradients that shrink, so that old averages are larger than new squares."""

CHOICES: dict[str, dict[str, list[Any]]] = {
    "ademamix": {
        "betas": [(0.9, 0.99, 0.999), (0.5, 0.0, 0.9)],
        "alpha": [0.0, 5.0],
        "alpha_warmup": [0, 7, 100],
        "beta3_warmup": [0, 7, 100],
        "eps": [1e-8, 1e-2],
    },
    "adopt": {
        "betas": [(0.9, 0.99), (0.0, 0.5)],
        "eps": [1e-6, 0.5],
        "decouple": [False, True],
        "clip": [False, True],
        "clip_power": [0.0, 0.25],
    },
    "adan": {
        "betas": [(0.98, 0.92, 0.99), (0.5, 0.0, 0.9)],
        "eps": [1e-8, 1e-2],
        "no_prox": [False, True],
    },
    "adabelief": {
        "betas": [(0.9, 0.99), (0.5, 0.0)],
        "eps": [1e-16, 1e-2],
        "amsgrad": [False, True],
        "decoupled_weight_decay": [False, True],
    },
    "yogi": {
        "betas": [(0.9, 0.99), (0.0, 0.5)],
        "eps": [1e-3, 0.5],
        "initial_accumulator_value": [1e-6, 2.0],
        "bias_correction": [False, True],
    },
    "laprop": {"betas": [(0.9, 0.99), (0.0, 0.5)], "eps": [1e-15, 0.5]},
    "stable_adamw": {"betas": [(0.9, 0.99), (0.0, 0.5)], "eps": [1e-6, 0.5]},
    "qhadam": {
        "betas": [(0.9, 0.99), (0.0, 0.5)],
        "nus": [(0.7, 1.0), (0.0, 0.5), (1.0, 0.0)],
        "eps": [1e-8, 0.5],
        "decoupled_weight_decay": [False, True],
    },
    "adabound": {
        "betas": [(0.9, 0.99), (0.0, 0.5)],
        "final_lr": [0.05, 2.0],
        "gamma": [1e-3, 0.5],
        "eps": [1e-8, 0.5],
        "amsbound": [False, True],
    },
}


def require_close(found: Tensor, wanted: Tensor, start: Tensor = START) -> None:
    """Compare how two optimizers have changed a parameter."""
    torch.testing.assert_close(found - start, wanted - start, rtol=1e-11, atol=1e-13)


def require_equal_steps(
    one: Optimizer, other: Optimizer, grads: list[Tensor] | None = None
) -> None:
    """Run two optimizers on the same gradients, and compare their parameters."""
    given = GRADS if grads is None else grads
    ends = [steps(made, START, lambda k: given[k], STEPS)[0] for made in (one, other)]
    require_close(*ends)


@pytest.mark.parametrize("name", CHOICES)
def test_an_algorithm_is_its_formula(name: str) -> None:
    """Each algorithm matches its formula for every pair of options.

    The test compares parameters and the first tensor of the state.
    """
    assert set(CHOICES[name]) == set(OPTIONS[name])
    for one in pairs(**CHOICES[name], weight_decay=[0.0, 0.3], grads=["alike", "shrinking"]):
        hyper = {"lr": 0.1, **{key: value for key, value in one.items() if key != "grads"}}
        grads = SHRINKING if one["grads"] == "shrinking" else GRADS
        lists = [grad.tolist() for grad in grads]
        wanted, kept = run_formula(name, START.tolist(), lists, hyper)
        made = getattr(algorithms, name)(**hyper)
        found, state = steps(made, START, lambda k, given=grads: given[k], STEPS)
        with case(**one):
            require_close(found, torch.tensor(wanted, dtype=torch.float64))
            own = state.leaves.stages[-1].exp_avg
            torch.testing.assert_close(own.tolist(), kept, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", CHOICES)
def test_maximize_is_a_step_along_the_negated_gradient(name: str) -> None:
    build = getattr(algorithms, name)
    up, _ = steps(build(weight_decay=0.3, maximize=True), START, lambda k: GRADS[k], STEPS)
    down, _ = steps(build(weight_decay=0.3), START, lambda k: -GRADS[k], STEPS)
    assert torch.equal(up, down)
    assert not torch.equal(up, START)


def test_ademamix_without_the_slow_average_is_adamw() -> None:
    betas = (0.9, 0.99)
    ours = ademamix(0.1, (*betas, 0.999), alpha=0.0, weight_decay=0.1, beta3_warmup=5)
    require_equal_steps(ours, adamw(0.1, betas, weight_decay=0.1))


def test_ademamix_warms_up_in_half_lives() -> None:
    """Halfway through the warm-up, the half-life of the slow average is a mean of two half-lives.

    These are the half-lives of b1 and b3. With decays 1/2 and 1/16, they are 1 and 1/4. Their mean
    is 5/8, the half-life of the decay 2^(-8/5).
    """
    ours = ademamix(betas=(0.0625, 0.999, 0.5), beta3_warmup=2)
    _, state = ours.update(torch.zeros(1).double(), torch.ones(1).double(), ours.init(START[:1]))
    slow = state.leaves.stages[-1].exp_avg_slow.item()
    assert slow == pytest.approx(1 - 2 ** (-8 / 5), rel=1e-14)


@pytest.mark.parametrize("decouple", [False, True])
def test_the_first_step_of_adopt_only_sets_the_average_square(decouple: bool) -> None:
    ours = adopt(lr=0.1, eps=0.0, decouple=decouple, weight_decay=0.3)
    params, state = ours.update(START, GRADS[0], ours.init(START))
    assert torch.equal(params, START)
    exp_avg, exp_avg_sq = state.leaves.stages[-1]
    grad = GRADS[0] if decouple else GRADS[0] + 0.3 * START
    assert exp_avg.count_nonzero() == 0
    torch.testing.assert_close(exp_avg_sq, grad**2)


def test_adopt_of_constant_gradients_is_momentum_of_signs() -> None:
    """For constant gradients, each quotient is a sign, so step t moves by lr * (1 - b1^t)."""
    found, _ = steps(adopt(0.1, (0.9, 0.99)), START, lambda k: GRADS[0], STEPS)
    way = sum(0.1 * (1 - 0.9**t) for t in range(1, STEPS))
    require_close(found, START - way * GRADS[0].sign())


def test_adan_without_differences_is_adam() -> None:
    require_equal_steps(adan(0.1, (0.9, 0.0, 0.99)), adam(0.1, (0.9, 0.99)))
    ours = adan(0.1, (0.9, 0.0, 0.99), weight_decay=0.1, no_prox=True)
    require_equal_steps(ours, adamw(0.1, (0.9, 0.99), weight_decay=0.1))


def test_adan_of_constant_gradients_is_adam() -> None:
    grads = [GRADS[0]] * STEPS
    require_equal_steps(adan(0.1, (0.9, 0.5, 0.99)), adam(0.1, (0.9, 0.99)), grads)


def test_adabelief_without_momentum_is_sgd() -> None:
    """Without momentum, the average predicts each gradient, so that s is a sum of eps alone."""
    lr, b2, eps = 0.1, 0.99, 1e-3
    ours = adabelief(lr, (0.0, b2), eps, weight_decay=0.1, decoupled_weight_decay=False)
    rate = lr / ((eps / (1 - b2)) ** 0.5 + eps)
    require_equal_steps(ours, sgd(rate, weight_decay=0.1))


def test_yogi_is_adagrad_while_squares_exceed_their_average() -> None:
    """While squares exceed v, v is its first value plus (1 - b2) times the sum of squares."""
    b2, grads = 0.999, [one.sign() + one / 10 for one in GRADS]
    scale = (1 - b2) ** 0.5
    ours = yogi(
        0.1,
        (0.0, b2),
        eps=1e-3,
        initial_accumulator_value=0.3 * (1 - b2),
        bias_correction=False,
    )
    other = adagrad(0.1 / scale, initial_accumulator_value=0.3, eps=1e-3 / scale)
    require_equal_steps(ours, other, grads)


def test_laprop_without_momentum_is_rmsprop() -> None:
    """Without momentum, LaProp is Adam, and RMSprop with schedules for the bias correction."""
    b2 = 0.99

    def root(made: float) -> float:
        return (1 - b2 ** (made + 1)) ** 0.5

    ours = laprop(0.1, (0.0, b2), eps=1e-3)
    require_equal_steps(ours, adam(0.1, (0.0, b2), eps=1e-3))
    other = rmsprop(lambda made: 0.1 * root(made), b2, eps=lambda made: 1e-3 * root(made))
    require_equal_steps(ours, other)


def test_stable_adamw_is_adamw_while_gradients_shrink() -> None:
    """While gradients shrink, no square exceeds the average of squares, so nothing is clipped."""
    grads = [(-0.9) ** k * GRADS[0] for k in range(STEPS)]
    ours = stable_adamw(0.1, (0.9, 0.99), weight_decay=0.1)
    require_equal_steps(ours, adamw(0.1, (0.9, 0.99), eps=1e-6, weight_decay=0.1), grads)


def test_stable_adamw_takes_a_part_of_the_step_where_a_gradient_jumps() -> None:
    betas, grads = (0.9, 0.99), [GRADS[0], 100 * GRADS[0]]
    hyper: Any = {"lr": 0.1, "betas": betas, "eps": 1e-12, "weight_decay": 0.1}
    ours, _ = steps(stable_adamw(**hyper), START, lambda k: grads[k], 2)
    whole, _ = steps(adamw(**hyper), START, lambda k: grads[k], 2)
    before, _ = steps(adamw(**hyper), START, lambda k: grads[k], 1)
    second = (betas[1] + 100**2) / (1 + betas[1])  # v of step 2 over the first gradient squared
    require_close(ours, before + (whole - before) * second**0.5 / 100, before)


def test_qhadam_with_full_weights_is_adam() -> None:
    require_equal_steps(qhadam(0.1, (0.9, 0.99), (1.0, 1.0)), adam(0.1, (0.9, 0.99)))
    ours = qhadam(0.1, (0.9, 0.99), (1.0, 1.0), weight_decay=0.1, decoupled_weight_decay=True)
    require_equal_steps(ours, adamw(0.1, (0.9, 0.99), weight_decay=0.1))


def test_qhadam_without_averages_is_a_step_of_signs() -> None:
    found, _ = steps(qhadam(0.1, (0.9, 0.99), (0.0, 0.0), 0.0), START, lambda k: GRADS[k], STEPS)
    require_close(found, START - 0.1 * sum(one.sign() for one in GRADS))


def test_adabound_with_far_bounds_is_adam() -> None:
    """With distant bounds, AdaBound is Adam.

    eps is 0, since the two algorithms add eps at different places.
    """
    for amsbound in (False, True):
        ours = adabound(0.1, (0.9, 0.99), gamma=1e-200, eps=0.0, amsbound=amsbound)
        with case(amsbound=amsbound):
            require_equal_steps(ours, adam(0.1, (0.9, 0.99), eps=0.0, amsgrad=amsbound))


def test_adabound_at_its_upper_bound_is_sgd_with_momentum() -> None:
    """At its upper bound, AdaBound is QHM with ``nu = 1``: the bound is the learning rate."""
    ours = adabound(1e9, (0.9, 0.99), final_lr=0.1, gamma=0.5)
    other = qhm(lambda made: 0.1 * (1 + 2 / (made + 1)), momentum=0.9, nu=1.0)
    require_equal_steps(ours, other)
