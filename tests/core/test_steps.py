"""``update`` changes nothing, and ``update_`` makes the same step in the given tensors."""

import gc
import weakref
from typing import Any

import pytest
import torch

from functional_optim import Optimizer, adam, sgd
from functional_optim.kernels import ExecutorName
from tests.choices import each, has_turn

from .scenarios import SCENARIOS, assert_steps_alike
from .support import (
    EVERY,
    IN_PYTHON,
    REAL,
    Frozen,
    assert_same,
    noise,
    tensors,
    tree,
)


@each("scenario", scenario=SCENARIOS, executor=IN_PYTHON, name=EVERY)
def test_update_is_pure_and_update_in_place_is_the_same(
    scenario: str, executor: ExecutorName, name: str
) -> None:
    """Each optimizer has every third scenario, by turns; the laws try other leaves."""
    if not has_turn(3, list(SCENARIOS).index(scenario), list(EVERY).index(name)):
        return
    if name.split(maxsplit=1)[0] in REAL and any(
        map(torch.is_complex, tensors(SCENARIOS[scenario](0)))
    ):
        with pytest.raises(ValueError, match="takes parameters of torch.float32"):
            EVERY[name].init(SCENARIOS[scenario](0))
        return
    assert_steps_alike(EVERY[name], SCENARIOS[scenario], executor)


def test_no_gradient_at_all_is_no_step() -> None:
    params: Any = {"a": noise(0, 3), "b": None}
    state = adam().init(params)
    frozen = Frozen(params, state)
    new, new_state = adam().update(params, {"a": None, "b": None}, state)
    adam().update_(params, {"a": None, "b": None}, state)
    frozen.assert_untouched()
    assert new["a"] is params["a"] and new["b"] is None
    assert new_state.leaves["a"] is state.leaves["a"] and new_state.leaves["b"] is None


def test_an_old_state_can_be_stepped_from_again() -> None:
    optimizer, params = adam(0.1), tree(0)
    state = optimizer.init(params)
    params, state = optimizer.update(params, tree(1), state)
    first = optimizer.update(params, tree(2), state)
    assert_same(optimizer.update(params, tree(2), state), first)
    other = state._replace(shared=(torch.ones(2),))
    for step in (optimizer.update, optimizer.update_):
        with pytest.raises(ValueError, match="has shared numbers, and this optimizer keeps none"):
            step(params, tree(2), other)


def _released(optimizer: Optimizer, hyper: dict[str, Any]) -> bool:
    param = torch.ones(2)
    optimizer.update(param, param, optimizer.init(param), **hyper)
    seen = [weakref.ref(value) for value in hyper.values()]
    hyper.clear()
    gc.collect()
    return all(one() is None for one in seen)


def test_a_hyper_parameter_of_one_step_is_released_after_it() -> None:
    """A tensor that is kept would keep alive the whole graph that computed it."""
    rate, big = torch.tensor(0.1, requires_grad=True), torch.ones(3)
    assert _released(adam(), {"lr": rate * 1.0})
    assert _released(sgd(momentum=0.9), {"lr": rate * 1.0})
    assert _released(adam(), {"lr": lambda made: big[0].item()})
