"""``state_field`` and ``with_state_field``: single fields of a state, by name."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from functional_optim import Rule, State, adamw, chain, sgd, state_field, with_state_field


class Hyper(NamedTuple):
    lr: float


class Kept(NamedTuple):
    buffers: list[Tensor]
    average: Tensor


PARAMS = {"w": torch.ones(2), "b": None}
RULE = Rule(
    name="two_buffers",
    hyper=Hyper,
    state=Kept,
    init=lambda param, hyper: Kept(
        [torch.zeros_like(param), torch.ones_like(param)], param.clone()
    ),
    rule=lambda param, grad, state, c: (param, state),
)
OPTIMIZER = chain(RULE(lr=0.1))


def kept(state: State) -> Kept:
    found: Kept = state.leaves["w"].stages[-1]
    return found


def test_a_field_is_a_tree_of_the_tensors_themselves() -> None:
    state = OPTIMIZER.init(PARAMS)
    assert state_field(OPTIMIZER, state, "average")["w"] is kept(state).average
    assert state_field(OPTIMIZER, state, "buffers[1]")["w"] is kept(state).buffers[1]
    assert state_field(OPTIMIZER, state, "step")["w"] is state.leaves["w"].step
    assert state_field(OPTIMIZER, state, "buffers[2]") == {"w": None, "b": None}


@pytest.mark.parametrize("name", ["average", "buffers[0]", "buffers[1]", "step"])
def test_only_the_named_field_is_replaced_by_a_copy(name: str) -> None:
    state = OPTIMIZER.init(PARAMS)
    old = state_field(OPTIMIZER, state, name)["w"]
    new = torch.full_like(old, 7)
    after = with_state_field(OPTIMIZER, state, name, {"w": new, "b": None})
    new.zero_()
    for other in ("average", "buffers[0]", "buffers[1]", "step"):
        before = state_field(OPTIMIZER, state, other)["w"]
        now = state_field(OPTIMIZER, after, other)["w"]
        if other == name:
            assert torch.equal(now, torch.full_like(before, 7))
            assert not torch.equal(now, before)
        else:
            assert now is before


def test_a_copy_has_the_strides_of_the_state() -> None:
    param = torch.ones(3, 2).t()
    optimizer = adamw(lr=0.1)
    state = optimizer.init(param)
    after = with_state_field(optimizer, state, "exp_avg", torch.rand(2, 3))
    assert after.leaves.stages[-1].exp_avg.stride() == state.leaves.stages[-1].exp_avg.stride()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("buffers", r"buffers at 'w' is 2 tensors; name one of them: buffers\[0\], buffers\[1\]"),
        ("average[0]", "average.0. at 'w': the field is one tensor, and has no parts; name it av"),
        ("exp_avg", "no field of state 'exp_avg'; its state has step, buffers, average$"),
        ("step[0]", r"no field of state 'step\[0\]'; its state has step, buffers, average$"),
    ],
)
def test_a_name_that_is_no_field_is_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        state_field(OPTIMIZER, OPTIMIZER.init(PARAMS), name)


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("average", 0.5, TypeError, "average at 'w' must be a tensor or None, got 0.5"),
        ("average", None, ValueError, "average at 'w' is None, and the leaf has such a tensor"),
        ("average", torch.ones(3), ValueError, r"has shape \(3,\), and must have shape \(2,\)"),
        ("average", torch.ones(2).double(), ValueError, "has dtype torch.float64, and must"),
        ("buffers[2]", torch.ones(2), ValueError, "the leaf has no such tensor; leave None there"),
        ("step", torch.tensor(-1), ValueError, "step at 'w' must be a whole number >= 0, got -1"),
    ],
)
def test_a_value_that_does_not_fit_is_refused(
    name: str, value: Any, error: type[Exception], message: str
) -> None:
    state = OPTIMIZER.init(PARAMS)
    with pytest.raises(error, match=message):
        with_state_field(OPTIMIZER, state, name, {"w": value, "b": None})


def test_a_state_of_another_optimizer_is_refused() -> None:
    state = sgd(lr=0.1, momentum=0.9).init(PARAMS)
    with pytest.raises(ValueError, match="the state at 'w' is of another optimizer"):
        state_field(OPTIMIZER, state, "average")
    with pytest.raises(TypeError, match="state must be the State that init or update returned"):
        state_field(OPTIMIZER, state.leaves, "average")
