"""What autograd has computed is not written into: what it was used for would not be told."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import Optimizer, TorchOptimizer, adamw, export_step, sgd
from functional_optim.executors import EXECUTORS

from .support import Frozen

Params = dict[str, Tensor]


def computed() -> Params:
    """The first is a leaf, and the second what another leaf was multiplied to."""
    return {"a": torch.ones(3, requires_grad=True), "z": torch.ones(3, requires_grad=True) * 2.0}


def of_a_view() -> Params:
    """The second is a view of a leaf, into which one could write."""
    return {"a": torch.ones(3), "z": torch.ones(4, requires_grad=True)[1:]}


def grads_of(params: Params) -> dict[str, Tensor]:
    return {name: torch.ones_like(param) for name, param in params.items()}


def in_place(optimizer: Optimizer, params: Params) -> None:
    optimizer.update_(params, grads_of(params), optimizer.init(params))


def bound(optimizer: Optimizer, params: Params) -> None:
    optimizer.bind(params).step(grads_of(params))


def scripted(optimizer: Optimizer, params: Params) -> None:
    optimizer.script(params).step(list(grads_of(params).values()))


def exported(optimizer: Optimizer, params: Params) -> None:
    export_step(optimizer, params)


def by_torch(optimizer: Optimizer, params: Params) -> None:
    TorchOptimizer(params.values(), optimizer)


def by_torch_flat(optimizer: Optimizer, params: Params) -> None:
    TorchOptimizer(params.values(), optimizer, flat=True)


def in_a_group(optimizer: Optimizer, params: Params) -> None:
    TorchOptimizer([torch.ones(2)], optimizer).add_param_group({"params": [*params.values()]})


WAYS = [in_place, bound, scripted, exported, by_torch, by_torch_flat, in_a_group]


@pytest.mark.parametrize("params_of", [computed, of_a_view])
@pytest.mark.parametrize("way", WAYS)
def test_it_is_refused_before_anything_is_changed(
    way: Callable[..., None], params_of: Callable[[], Params]
) -> None:
    """As torch.optim refuses it, with an error of the same type (fault 9)."""
    params = params_of()
    frozen = Frozen(params)
    with pytest.raises(ValueError, match=r"is no leaf of autograd.*detach\(\)"):
        way(sgd(0.1), params)
    frozen.assert_untouched()
    with pytest.raises(ValueError, match="leaf"):
        torch.optim.SGD(params.values())


@pytest.mark.parametrize("executor", EXECUTORS)
def test_by_every_executor(executor: Any) -> None:
    """The leaf before it has not been stepped either (fault 9)."""
    params = computed()
    frozen = Frozen(params)
    with pytest.raises(ValueError, match="'z' is no leaf of autograd"):
        in_place(adamw(0.1).using(executor=executor), params)
    frozen.assert_untouched()


def test_where_it_is_not_stepped_it_may_stand() -> None:
    params = computed()
    optimizer = sgd(0.5)
    state = optimizer.init(params)
    optimizer.update_(params, {"a": torch.ones(3), "z": None}, state)
    assert params["a"].tolist() == [0.5] * 3


def test_state_that_has_a_history_is_refused() -> None:
    """State of a step that autograd followed is no buffer to write into (fault 9)."""
    optimizer = sgd(0.1, momentum=0.9, weight_decay=0.1)
    params: Any = {"w": torch.ones(3, requires_grad=True)}
    _, state = optimizer.update(params, grads_of(params), optimizer.init(params))
    frozen = Frozen(params, state)
    with pytest.raises(ValueError, match="the state at 'w' is no leaf of autograd"):
        optimizer.update_(params, grads_of(params), state)
    with pytest.raises(ValueError, match="the state at 'w' is no leaf of autograd"):
        optimizer.script(params, state)
    frozen.assert_untouched()
    bound = optimizer.bind(params, state)  # into buffers of its own
    bound.step(grads_of(params))
    assert int(bound.state.leaves["w"].step) == 2


def test_what_retains_its_gradient_is_stepped_as_torch_does() -> None:
    ours, theirs = torch.ones(3, requires_grad=True) * 2.0, torch.ones(3, requires_grad=True) * 2.0
    for one in (ours, theirs):
        one.retain_grad()
        one.square().sum().backward()
    torch.optim.SGD([theirs], 0.1).step()
    sgd(0.1).update_(ours, ours.grad, sgd(0.1).init(ours))
    assert torch.equal(ours, theirs)


def test_the_pure_step_takes_it() -> None:
    leaf = torch.ones(3, requires_grad=True)
    optimizer = sgd(0.1)
    new, _ = optimizer.update(leaf * 2.0, torch.ones(3), optimizer.init(leaf * 2.0))
    new.sum().backward()
    assert leaf.grad is not None and leaf.grad.tolist() == [2.0] * 3
