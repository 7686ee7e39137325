"""``update`` changes nothing, and ``update_`` makes the same step in the given tensors."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from functional_optim import Optimizer, adam, chain, clip_by_global_norm, sgd
from functional_optim.kernels import ExecutorName
from tests.choices import each, each_value

from .scenarios import SCENARIOS, assert_steps_alike
from .support import (
    EVERY,
    IN_PYTHON,
    REAL,
    VARIANTS,
    Frozen,
    assert_differ,
    assert_nothing_left_behind,
    assert_same,
    noise,
    tensors,
    tree,
)


@each("scenario", scenario=SCENARIOS, executor=IN_PYTHON, name=EVERY)
def test_update_is_pure_and_update_in_place_is_the_same(
    scenario: str, executor: ExecutorName, name: str
) -> None:
    if name.split(maxsplit=1)[0] in REAL and any(
        map(torch.is_complex, tensors(SCENARIOS[scenario](0)))
    ):
        with pytest.raises(ValueError, match="takes parameters of torch.float32"):
            EVERY[name].init(SCENARIOS[scenario](0))
        return
    assert_steps_alike(EVERY[name], SCENARIOS[scenario], executor)


@each_value(optimizer=VARIANTS)
def test_a_leaf_steps_as_if_it_were_alone_when_it_has_a_gradient(optimizer: Optimizer) -> None:
    """A leaf that misses a gradient skips the step, as if the step had not happened."""
    params: dict[str, Tensor] = {"a": noise(0, 4), "b": noise(0, 4)}
    state = optimizer.init(params)
    for index in range(4):
        grad = noise(index + 1, 4)
        grads = {"a": grad, "b": grad if index % 2 else None}
        new, new_state = optimizer.update(params, grads, state)
        untouched = Frozen(*(() if index % 2 else (params["b"], state.leaves["b"])))
        optimizer.update_(params, grads, state)
        untouched.assert_untouched()
        assert_same((params, state), (new, new_state))
    alone, alone_state = noise(0, 4), optimizer.init(noise(0, 4))
    for index in (1, 3):
        alone, alone_state = optimizer.update(alone, noise(index + 1, 4), alone_state)
    assert_same((params["b"], state.leaves["b"]), (alone, alone_state.leaves))
    assert [int(leaf.step) for leaf in state.leaves.values()] == [4, 2]
    assert_differ(params["a"], params["b"])


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


def test_module_parameters_are_stepped_in_place_without_autograd() -> None:
    module = nn.Linear(3, 2)
    params = dict(module.named_parameters())
    optimizer = chain(clip_by_global_norm(1.0), adam(0.1))
    state = optimizer.init(params)
    before = [param.detach().clone() for param in module.parameters()]
    module(noise(0, 5, 3, dtype=torch.float32)).square().sum().backward()
    optimizer.update_(params, {key: param.grad for key, param in params.items()}, state)
    assert_differ(before, [param.detach() for param in module.parameters()])
    assert all(param.requires_grad and param.is_leaf for param in module.parameters())
    assert not any(tensor.requires_grad for tensor in tensors(state))


def test_update_in_place_leaves_no_tensor_behind() -> None:
    assert_nothing_left_behind(
        [one.using(executor=executor) for executor in IN_PYTHON for one in EVERY.values()]
    )


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
