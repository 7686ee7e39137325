"""Each algorithm with elementwise or per-tensor steps matches its paper's formula in float64."""

from collections.abc import Callable
from functools import partial
from typing import Any

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


def adaptive(name: str) -> Callable[..., Any]:
    def formula(p: Any, grads: Any, **hyper: Any) -> Any:
        return formulas_adaptive.run_formula(name, p, grads, hyper)

    return formula


FORMULAS: dict[str, Callable[..., Any]] = {
    **{name: adaptive(name) for name in formulas_adaptive.OPTIONS},
    **formulas_first.FORMULAS,
    **formulas_layerwise.FORMULAS,
    "rowwise_adagrad": partial(formulas_first.rowwise_adagrad_formula, width=SHAPE[1]),
    "came": partial(formulas_layerwise.came_formula, columns=SHAPE[1]),
    "lars without momentum": formulas_first.lars_formula,
}
OPTIONS: dict[str, dict[str, list[Any]]] = {
    **formulas_adaptive.OPTIONS,
    **formulas_first.OPTIONS,
    **formulas_layerwise.OPTIONS,
    "adam_mini": {**formulas_layerwise.OPTIONS["adam_mini"], "blocks": [1, 3]},
    "lars without momentum": {
        **formulas_first.OPTIONS["lars"],
        "momentum": [0],
        "nesterov": [False],
    },
}
RTOL = {"lamb": 1e-11, "lars": 1e-11, "ftrl": 1e-10}
"""Relative tolerances other than 1e-12. Absolute tolerances are a hundredth of them."""

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


@pytest.mark.parametrize("name", FORMULAS)
def test_it_is_the_formula_of_its_paper(name: str) -> None:
    """Parameters and the first tensor of the state match after 20 steps, with all options."""
    rtol = RTOL.get(name, 1e-12)
    near = {"rtol": rtol, "atol": rtol / 100}
    for one in pairs(**OPTIONS[name], grads=list(GRADS)):
        grads = GRADS[one["grads"]]
        hyper = {key: value for key, value in one.items() if key != "grads"}
        optimizer = getattr(algorithms, name.split(maxsplit=1)[0])(**hyper)
        param, state = START, optimizer.init(START)
        for grad in grads:
            param, state = optimizer.update(param, grad, state)
        lists = [grad.flatten().tolist() for grad in grads]
        end, kept = (
            torch.tensor(values, dtype=torch.float64)
            for values in FORMULAS[name](START.flatten().tolist(), lists, **hyper)
        )
        own = [t for stage in state.leaves.stages for field in stage for t in field_tensors(field)]
        with case(**one):
            torch.testing.assert_close(param - START, end.reshape(SHAPE) - START, **near)
            for found in own[:1]:
                torch.testing.assert_close(found.flatten(), kept, **near)


def test_defaults_of_qhm_are_those_of_its_paper() -> None:
    hyper = algorithms.qhm().hyper
    assert [hyper[name] for name in ("momentum", "nu", "lr")] == [0.999, 0.7, 1.0]
