"""Each algorithm with elementwise or per-tensor steps matches its paper's formula in float64."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from functional_optim import algorithms
from functional_optim.core.state import field_tensors

from ..choices import case, pairs
from ..tensors import normal
from . import formulas_adaptive, formulas_first, formulas_layerwise

STEPS = 20
SHAPE = (3, 4)


class Compared(NamedTuple):
    """A formula, the options to compare it with, and its arguments that are no options."""

    formula: Callable[..., Any]
    options: dict[str, list[Any]]
    more: Mapping[str, Any] = MappingProxyType({})
    rtol: float = 1e-12
    """Relative tolerance. The absolute tolerance is a hundredth of it."""


def adaptive(name: str, **options: list[Any]) -> Compared:
    def formula(p: Any, grads: Any, **hyper: Any) -> Any:
        return formulas_adaptive.run_formula(name, p, grads, hyper)

    assert set(options) == set(formulas_adaptive.OPTIONS[name])
    return Compared(formula, {"lr": [0.1], "weight_decay": [0.0, 0.3], **options}, rtol=1e-11)


def first(name: str, rtol: float = 1e-12, **options: list[Any]) -> Compared:
    return Compared(formulas_first.FORMULAS[name], {"lr": [0.1], **options}, rtol=rtol)


COMPARED: dict[str, Compared] = {
    "ademamix": adaptive(
        "ademamix",
        betas=[(0.9, 0.99, 0.999), (0.5, 0.0, 0.9)],
        alpha=[0.0, 5.0],
        alpha_warmup=[0, 7, 100],
        beta3_warmup=[0, 7, 100],
        eps=[1e-8, 1e-2],
    ),
    "adopt": adaptive(
        "adopt",
        betas=[(0.9, 0.99), (0.0, 0.5)],
        eps=[1e-6, 0.5],
        decouple=[False, True],
        clip=[False, True],
        clip_power=[0.0, 0.25],
    ),
    "adan": adaptive(
        "adan",
        betas=[(0.98, 0.92, 0.99), (0.5, 0.0, 0.9)],
        eps=[1e-8, 1e-2],
        no_prox=[False, True],
    ),
    "adabelief": adaptive(
        "adabelief",
        betas=[(0.9, 0.99), (0.5, 0.0)],
        eps=[1e-16, 1e-2],
        amsgrad=[False, True],
        decoupled_weight_decay=[False, True],
    ),
    "yogi": adaptive(
        "yogi",
        betas=[(0.9, 0.99), (0.0, 0.5)],
        eps=[1e-3, 0.5],
        initial_accumulator_value=[1e-6, 2.0],
        bias_correction=[False, True],
    ),
    "laprop": adaptive("laprop", betas=[(0.9, 0.99), (0.0, 0.5)], eps=[1e-15, 0.5]),
    "stable_adamw": adaptive("stable_adamw", betas=[(0.9, 0.99), (0.0, 0.5)], eps=[1e-6, 0.5]),
    "qhadam": adaptive(
        "qhadam",
        betas=[(0.9, 0.99), (0.0, 0.5)],
        nus=[(0.7, 1.0), (0.0, 0.5), (1.0, 0.0)],
        eps=[1e-8, 0.5],
        decoupled_weight_decay=[False, True],
    ),
    "adabound": adaptive(
        "adabound",
        betas=[(0.9, 0.99), (0.0, 0.5)],
        final_lr=[0.05, 2.0],
        gamma=[1e-3, 0.5],
        eps=[1e-8, 0.5],
        amsbound=[False, True],
    ),
    "qhm": first(
        "qhm",
        momentum=[0.0, 0.5, 0.999],
        nu=[0.0, 0.3, 0.7, 1.0, 1.5],
        weight_decay=[0.0, 0.3],
        weight_decay_type=["grad", "direct"],
        maximize=[False, True],
    ),
    "lion": first(
        "lion",
        betas=[(0.9, 0.99), (0.0, 0.5), (0.95, 0.0), (0.6, 0.2)],
        weight_decay=[0.0, 0.3],
        maximize=[False, True],
    ),
    "lamb": first(
        "lamb",
        rtol=1e-11,
        betas=[(0.9, 0.999), (0.0, 0.5), (0.7, 0.0)],
        eps=[1e-6],
        weight_decay=[0.0, 0.3],
        min_norm=[0.0, 5.0],
        max_ratio=[0.2, math.inf],
        maximize=[False, True],
    ),
    "lars": first(
        "lars",
        rtol=1e-11,
        momentum=[0.9],
        weight_decay=[0.0, 0.3],
        trust_coefficient=[0.5, 2.0],
        nesterov=[False, True],
        maximize=[False, True],
    ),
    "lars without momentum": first(
        "lars", rtol=1e-11, momentum=[0.0], weight_decay=[0.0, 0.3], trust_coefficient=[0.5]
    ),
    "rowwise_adagrad": Compared(
        formulas_first.rowwise_adagrad_formula,
        {"lr": [0.1], "eps": [1e-8, 0.1], "weight_decay": [0.0, 0.2]},
        {"width": SHAPE[1]},
    ),
    "ftrl": Compared(
        formulas_first.ftrl_formula,
        {"lr": [0.1, 2.0], "beta": [0.0, 1.0], "l1": [0.0, 4.0], "l2": [0.0, 0.4]},
        rtol=1e-10,
    ),
    "sign_sgd": Compared(
        formulas_layerwise.sign_sgd_formula, {"lr": [0.1], "weight_decay": [0, 0.1]}
    ),
    "signum": Compared(
        formulas_layerwise.signum_formula,
        {"lr": [0.1], "momentum": [0.0, 0.9], "weight_decay": [0.0, 0.1]},
    ),
    "novograd": Compared(
        formulas_layerwise.novograd_formula,
        {
            "lr": [0.1],
            "betas": [(0.95, 0.98), (0.0, 0.5)],
            "eps": [1e-8, 0.1],
            "weight_decay": [0.0, 0.1],
            "grad_averaging": [False, True],
        },
    ),
    "came": Compared(
        formulas_layerwise.came_formula,
        {
            "lr": [0.01],
            "betas": [(0.9, 0.999, 0.9999), (0.5, 0.9, 0.8)],
            "eps": [(1e-30, 1e-16), (1e-2, 1e-1)],
            "clip_threshold": [1.0, 0.3],
            "weight_decay": [0.0, 0.1],
        },
        {"columns": SHAPE[1]},
    ),
    "adam_mini": Compared(
        formulas_layerwise.adam_mini_formula,
        {
            "lr": [0.1],
            "betas": [(0.9, 0.95), (0.0, 0.5)],
            "eps": [1e-8, 0.1],
            "weight_decay": [0.0, 0.1],
            "blocks": [1, 3],
        },
    ),
    "dog": Compared(
        formulas_layerwise.dog_formula,
        {
            "lr": [1.0, 0.5],
            "reps_rel": [1e-6, 0.1],
            "eps": [1e-8, 0.1],
            "weight_decay": [0.0, 0.1],
        },
    ),
    "dadapt_sgd": Compared(
        formulas_layerwise.dadapt_sgd_formula,
        {
            "lr": [1.0, 0.5],
            "momentum": [0.0, 0.9],
            "weight_decay": [0.0, 0.1],
            "d0": [1e-6, 0.1],
            "growth_rate": [float("inf"), 1.3],
        },
    ),
    "dadapt_adam": Compared(
        formulas_layerwise.dadapt_adam_formula,
        {
            "lr": [1.0, 0.5],
            "betas": [(0.9, 0.999), (0.0, 0.5)],
            "eps": [1e-8, 0.1],
            "weight_decay": [0.0, 0.1],
            "decouple": [False, True],
            "use_bias_correction": [False, True],
            "d0": [1e-6, 0.1],
            "growth_rate": [float("inf"), 1.3],
        },
    ),
}
COMPARED["ldog"] = COMPARED["dog"]

noise = partial(normal, dtype=torch.float64)
START = noise(*SHAPE, seed=99)
GRADS: dict[str, list[Tensor]] = {
    "of one slope": [START * (1 - k / 8) + 0.3 * noise(*SHAPE, seed=k) for k in range(STEPS)],
    "alike": [noise(*SHAPE, seed=k + 1) for k in range(STEPS)],
    "shrinking": [0.8**k * noise(*SHAPE, seed=k + 1) for k in range(STEPS)],
}
"""Gradients of a slowly changing slope, so that estimated distances grow; of one size; and of
shrinking size, so that old averages are larger than new squares. One element has no slope."""
for _grad in GRADS["shrinking"]:
    _grad[0, 0] = 0.0


@pytest.mark.parametrize("name", COMPARED)
def test_it_is_the_formula_of_its_paper(name: str) -> None:
    """Parameters and the first tensor of the state match after 20 steps, with all options."""
    formula, options, more, rtol = COMPARED[name]
    near = {"rtol": rtol, "atol": rtol / 100}
    for one in pairs(**options, grads=list(GRADS)):
        grads = GRADS[one["grads"]]
        hyper = {key: value for key, value in one.items() if key != "grads"}
        optimizer = getattr(algorithms, name.split(maxsplit=1)[0])(**hyper)
        param, state = START, optimizer.init(START)
        for grad in grads:
            param, state = optimizer.update(param, grad, state)
        lists = [grad.flatten().tolist() for grad in grads]
        end, kept = (
            torch.tensor(values, dtype=torch.float64)
            for values in formula(START.flatten().tolist(), lists, **hyper, **more)
        )
        own = [t for stage in state.leaves.stages for field in stage for t in field_tensors(field)]
        with case(**one):
            torch.testing.assert_close(param - START, end.reshape(SHAPE) - START, **near)
            for found in own[:1]:
                torch.testing.assert_close(found.flatten(), kept, **near)


def test_defaults_of_qhm_are_those_of_its_paper() -> None:
    hyper = algorithms.qhm().hyper
    assert [hyper[name] for name in ("momentum", "nu", "lr")] == [0.999, 0.7, 1.0]
