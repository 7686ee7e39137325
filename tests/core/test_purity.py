"""``update`` changes nothing; ``update_`` is the same step, in the tensors that were given."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from functional_optim import Optimizer, adam, chain, clip_by_global_norm, sgd

from .support import CHAINS, VARIANTS, Frozen, assert_differ, assert_same, noise, tensors, tree

EVERY = {**VARIANTS, **CHAINS}


@pytest.mark.parametrize("executor", ["reference", "script"])
@pytest.mark.parametrize("name", EVERY)
def test_update_changes_nothing_it_was_given(name: str, executor: str) -> None:
    optimizer = EVERY[name].using(executor=executor)
    params, grads = tree(0), tree(1)
    state = optimizer.init(params)
    for _ in range(2):
        frozen = Frozen(params, grads, state)
        new, new_state = optimizer.update(params, grads, state)
        frozen.assert_untouched()
        assert_differ(new, params)
        shared = {t.data_ptr() for t in tensors(new, new_state) if t.numel()} & {
            t.data_ptr() for t in tensors(params, grads, state) if t.numel()
        }
        assert not shared
        params, state = new, new_state


@pytest.mark.parametrize("executor", ["reference", "script"])
@pytest.mark.parametrize("name", EVERY)
def test_update_in_place_is_update_bit_for_bit_in_the_same_memory(name: str, executor: str) -> None:
    optimizer = EVERY[name].using(executor=executor)
    params, state = tree(0), optimizer.init(tree(0))
    written, written_state = tree(0), optimizer.init(tree(0))
    kept = tensors(written, written_state)
    places = [tensor.data_ptr() for tensor in kept]
    for index in range(3):
        grads = tree(index + 1)
        frozen = Frozen(grads)
        params, state = optimizer.update(params, grads, state)
        result = optimizer.update_(written, grads, written_state)
        assert result is None
        frozen.assert_untouched()
        assert_same(written, params)
        assert_same(written_state, state)
    assert all(a is b for a, b in zip(tensors(written, written_state), kept, strict=True))
    assert [tensor.data_ptr() for tensor in kept] == places


@pytest.mark.parametrize("name", VARIANTS)
def test_a_leaf_without_a_gradient_is_left_alone_with_its_step_count(name: str) -> None:
    optimizer = VARIANTS[name]
    params: dict[str, Tensor] = tree(0)
    state = optimizer.init(params)
    params, state = optimizer.update(params, tree(1), state)
    grads: dict[str, Any] = {**tree(2), "b": None}

    new, new_state = optimizer.update(params, grads, state)
    assert new["b"] is params["b"]
    assert new_state.leaves["b"] is state.leaves["b"]

    untouched = Frozen(params["b"], state.leaves["b"])
    optimizer.update_(params, grads, state)
    untouched.assert_untouched()
    assert_same(params, new)
    assert {key: int(leaf.step) for key, leaf in state.leaves.items()} == {
        "w": 2,
        "b": 1,
        "s": 2,
        "e": 2,
    }


@pytest.mark.parametrize("name", VARIANTS)
def test_each_leaf_steps_as_if_it_were_alone(name: str) -> None:
    """A leaf that missed gradients is where it would be if those steps had never been."""
    optimizer = VARIANTS[name]
    param = noise(0, 4)
    params, state = {"a": param, "b": param.clone()}, None
    state = optimizer.init(params)
    for index in range(4):
        grad = noise(index + 1, 4)
        params, state = optimizer.update(
            params, {"a": grad, "b": grad if index % 2 else None}, state
        )
    alone, alone_state = param, optimizer.init(param)
    for index in (1, 3):
        alone, alone_state = optimizer.update(alone, noise(index + 1, 4), alone_state)
    assert_same(params["b"], alone)
    assert_same(state.leaves["b"], alone_state.leaves)
    assert int(state.leaves["a"].step) == 4
    assert_differ(params["a"], params["b"])


def test_what_belongs_to_no_leaf_is_handed_on() -> None:
    param = noise(0, 3)
    state = adam().init(param)._replace(shared=(torch.ones(2),))
    assert adam().update(param, param, state)[1].shared is state.shared


def test_an_old_state_can_be_stepped_from_again() -> None:
    optimizer, params = adam(0.1), tree(0)
    state = optimizer.init(params)
    params, state = optimizer.update(params, tree(1), state)
    first = optimizer.update(params, tree(2), state)
    second = optimizer.update(params, tree(2), state)
    assert_same(first, second)


def test_module_parameters_are_stepped_in_place_without_autograd() -> None:
    module = nn.Linear(3, 2)
    params = dict(module.named_parameters())
    optimizer = chain(clip_by_global_norm(1.0), adam(0.1))
    state = optimizer.init(params)
    before = [param.detach().clone() for param in module.parameters()]
    module(noise(0, 5, 3, dtype=torch.float32)).square().sum().backward()
    grads = {key: param.grad for key, param in params.items()}
    optimizer.update_(params, grads, state)
    assert_differ(before, [param.detach() for param in module.parameters()])
    assert all(param.requires_grad and param.is_leaf for param in module.parameters())
    assert not any(tensor.requires_grad for tensor in tensors(state))


def _alive() -> int:
    gc.collect()
    return sum(issubclass(type(one), Tensor) for one in gc.get_objects())


@pytest.mark.parametrize("executor", ["reference", "script"])
@pytest.mark.parametrize("name", EVERY)
def test_update_in_place_leaves_no_tensor_behind(name: str, executor: str) -> None:
    optimizer = EVERY[name].using(executor=executor)
    params, grads = tree(0), tree(1)
    state = optimizer.init(params)
    optimizer.update_(params, grads, state)
    before = _alive()
    for _ in range(3):
        optimizer.update_(params, grads, state)
    assert _alive() == before


def _released(optimizer: Optimizer, hyper: dict[str, Any]) -> bool:
    param = torch.ones(2)
    optimizer.update(param, param, optimizer.init(param), **hyper)
    seen = [weakref.ref(value) for value in hyper.values()]
    hyper.clear()
    gc.collect()
    return all(one() is None for one in seen)


def test_a_tensor_hyper_parameter_is_released_after_the_step() -> None:
    """Kept, it would keep alive the whole graph that it was computed by."""
    rate = torch.tensor(0.1, requires_grad=True)
    assert _released(adam(), {"lr": rate * 1.0})
    assert _released(sgd(momentum=0.9), {"lr": rate * 1.0})


def test_a_schedule_is_released_after_the_step() -> None:
    big = torch.ones(3)
    assert _released(adam(), {"lr": lambda made: big[0].item()})
