"""State that depends on parameters starts from their values at the first step."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from functional_optim import (
    Optimizer,
    TorchOptimizer,
    accumulate,
    adamw,
    chain,
    ema,
    lookahead,
    prodigy,
    schedule_free_adamw,
    sgd,
    stored,
)
from tests.choices import case

from .doors import DOORS

OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {
    "average": lambda: chain(sgd(0.1), ema(0.5)),
    "lookahead": lambda: chain(adamw(0.1), lookahead(2)),
    "schedule-free": lambda: schedule_free_adamw(0.1),
    "prodigy": lambda: prodigy(1.0, d0=1e-2),
    "accumulate": lambda: chain(accumulate(2), sgd(0.1), ema(0.5)),
    "master": lambda: stored(adamw(0.1), param="bfloat16+master"),
}


def in_place(model: nn.Module, weights: dict[str, Tensor]) -> None:
    model.load_state_dict(weights)


def by_data(model: nn.Module, weights: dict[str, Tensor]) -> None:
    for name, param in model.named_parameters():
        param.data = weights[name].clone()


def model_of(dtype: torch.dtype, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(3, 2).to(dtype)


def steps(model: nn.Module, step: Callable[[], object], numbers: range) -> None:
    for number in numbers:
        for k, param in enumerate(model.parameters(), 1):
            param.grad = torch.full_like(param, number / k)
        step()


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("door", DOORS)
def test_weights_may_be_loaded_after_construction(door: str, name: str) -> None:
    """Fault 44: such state starts from weights that were loaded after construction."""
    dtype = torch.bfloat16 if name == "master" else torch.float32
    weights = model_of(dtype, 1).state_dict()
    found = []
    for load in (None, in_place, by_data):
        model = model_of(dtype, 0)
        if load is None:
            model.load_state_dict(weights)
        step = DOORS[door](dict(model.named_parameters()), OPTIMIZERS[name]()).step
        if load is not None:
            load(model, weights)
        steps(model, step, range(1, 6))
        found.append(model.state_dict())
    for loaded in found[1:]:
        assert all(torch.equal(loaded[key], one) for key, one in found[0].items())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_after_the_first_step_state_is_kept(name: str) -> None:
    """Fault 44: a later write to a parameter does not change the state."""
    dtype = torch.bfloat16 if name == "master" else torch.float32
    weights = model_of(dtype, 1).state_dict()
    found = []
    for load in (in_place, by_data):
        model = model_of(dtype, 0)
        optimizer = TorchOptimizer(model.named_parameters(), OPTIMIZERS[name]())
        steps(model, optimizer.step, range(1, 4))
        before = copy.deepcopy(optimizer.state_dict()["state"])
        load(model, weights)
        with case(load=load):
            assert repr(optimizer.state_dict()["state"]) == repr(before)
        steps(model, optimizer.step, range(4, 6))
        found.append({**model.state_dict(), "state": optimizer.state_dict()["state"]})
    assert repr(found[1]) == repr(found[0])


ACCUMULATING: dict[str, Callable[[], Optimizer]] = {
    "lookahead": lambda: chain(accumulate(2), adamw(0.1), lookahead(2)),
    "schedule-free": lambda: chain(accumulate(2), schedule_free_adamw(0.1)),
    "prodigy": lambda: chain(accumulate(2), prodigy(1.0, d0=1e-2)),
    "two gates": lambda: chain(accumulate(2), accumulate(2), sgd(0.1), lookahead(2)),
}


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("name", ACCUMULATING)
@pytest.mark.parametrize("door", DOORS)
def test_weights_may_be_loaded_before_a_late_first_step(door: str, name: str) -> None:
    """State after a gate starts from the weights of the step in which its stage first runs.

    The weights are loaded after the first call, and the bias has no gradient in the next calls. So
    the gate steps the bias with the gradient that it has kept.
    """
    weights = model_of(torch.float32, 1).state_dict()
    found = []
    for load in (None, in_place, by_data):
        model = model_of(torch.float32, 0)
        if load is None:
            model.load_state_dict(weights)
        step = DOORS[door](dict(model.named_parameters()), ACCUMULATING[name]()).step
        for number in range(1, 14):
            if number == 2 and load is not None:
                load(model, weights)
            for k, param in enumerate(model.parameters(), 1):
                param.grad = torch.full_like(param, number / k)
            if number in (2, 3, 4):
                model.bias.grad = None
            step()
        found.append(model.state_dict())
    for loaded in found[1:]:
        assert all(torch.equal(loaded[key], one) for key, one in found[0].items())


def test_weights_may_be_loaded_before_stages_between_gates_run_again() -> None:
    """A plan does not run stages between two gates whose state is to be created again.

    The plan is known from steps before the state was cleared.
    """
    found = []
    for loads in (False, True):
        model = model_of(torch.float32, 0)
        gates = chain(accumulate(2), ema(0.5), accumulate(2), sgd(0.1))
        optimizer = TorchOptimizer(model.named_parameters(), gates)
        steps(model, optimizer.step, range(1, 9))
        optimizer.state.clear()
        weights = model_of(torch.float32, 1).state_dict()
        model.load_state_dict(weights if not loads else model_of(torch.float32, 2).state_dict())
        steps(model, optimizer.step, range(1, 2))
        model.load_state_dict(weights)
        steps(model, optimizer.step, range(2, 6))
        found.append(repr(optimizer.state_dict()["state"]))
    assert found[0] == found[1]
