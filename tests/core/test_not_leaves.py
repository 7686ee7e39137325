"""Tensors that autograd computed, which no step writes to because users would not notice."""

from typing import Any

import pytest
import torch

from functional_optim import adamw, sgd
from functional_optim.kernels import EXECUTORS
from tests.choices import each_value

from .support import Frozen, step
from .ways import WAYS_IN_PLACE, Way, computed, grads_of, of_a_view


@each_value(way=WAYS_IN_PLACE, params_of=[computed, of_a_view])
def test_it_is_refused_before_anything_is_changed(way: Way, params_of: Any) -> None:
    """torch.optim refuses such a tensor with an error of the same type."""
    params = params_of()
    frozen = Frozen(params)
    with pytest.raises(ValueError, match=r"is not a leaf of autograd.*; give the leaf, detach\(\)"):
        way(sgd(0.1), params)
    frozen.assert_untouched()
    with pytest.raises(ValueError, match="leaf"):
        torch.optim.SGD(params.values())


@each_value(executor=list(EXECUTORS))
def test_by_every_executor(executor: Any) -> None:
    """Every executor refuses the tensor before it steps any other leaf."""
    params, optimizer = computed(), adamw(0.1).using(executor=executor)
    frozen = Frozen(params)
    with pytest.raises(ValueError, match="'z' is not a leaf of autograd"):
        optimizer.update_(params, grads_of(params), optimizer.init(params))
    frozen.assert_untouched()


def test_where_it_is_not_stepped_it_may_stand() -> None:
    params = computed()
    sgd(0.5).update_(params, {"a": torch.ones(3), "z": None}, sgd().init(params))
    assert params["a"].tolist() == [0.5] * 3


def test_state_that_has_a_history_is_refused() -> None:
    """A step that autograd followed made the state, so no step writes to it."""
    optimizer = sgd(0.1, momentum=0.9, weight_decay=0.1)
    params: Any = {"w": torch.ones(3, requires_grad=True)}
    _, state = optimizer.update(params, grads_of(params), optimizer.init(params))
    frozen = Frozen(params, state)
    for way in (
        lambda: optimizer.update_(params, grads_of(params), state),
        lambda: optimizer.script(params, state),
    ):
        with pytest.raises(
            ValueError,
            match="the state at 'w' is not a leaf of autograd.*; make it under torch.no_grad",
        ):
            way()
    frozen.assert_untouched()
    bound = optimizer.bind(params, state)  # copies the state into new buffers
    bound.step(grads_of(params))
    assert int(bound.state.leaves["w"].step) == 2


def test_what_retains_its_gradient_is_stepped_as_torch_does() -> None:
    ours, theirs = (torch.ones(3, requires_grad=True) * 2.0 for _ in range(2))
    for one in (ours, theirs):
        one.retain_grad()
        one.square().sum().backward()
    torch.optim.SGD([theirs], 0.1).step()
    sgd(0.1).update_(ours, ours.grad, sgd(0.1).init(ours))
    assert torch.equal(ours, theirs)


def test_the_pure_step_takes_it() -> None:
    leaf = torch.ones(3, requires_grad=True)
    step(sgd(0.1), leaf * 2.0, torch.ones(3)).sum().backward()
    assert leaf.grad is not None and leaf.grad.tolist() == [2.0] * 3
