"""State that depends on parameters starts from their values at the first step."""

import copy
from collections.abc import Callable
from typing import Any

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
from functional_optim.frontends.local_optimizer import local_optimizer
from hooks.named_groups import NamedGroups
from sharding import ZeroRedundancyOptimizer
from tests.choices import case

OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {
    "average": lambda: chain(sgd(0.1), ema(0.5)),
    "lookahead": lambda: chain(adamw(0.1), lookahead(2)),
    "schedule-free": lambda: schedule_free_adamw(0.1),
    "prodigy": lambda: prodigy(1.0, d0=1e-2),
    "accumulate": lambda: chain(accumulate(2), sgd(0.1), ema(0.5)),
    "master": lambda: stored(adamw(0.1), param="bfloat16+master"),
}


def local(params: Any, optimizer: Optimizer) -> Any:
    params = list(params)
    made = local_optimizer(optimizer, params)
    return lambda: made.step([param.grad for _, param in params])


def by_hook(params: Any, optimizer: Optimizer) -> Any:
    params = dict(params)
    made = NamedGroups(params, optimizer)
    return lambda: made.step_some(list(params), [param.grad for param in params.values()])


DOORS: dict[str, Callable[[Any, Optimizer], Any]] = {
    "TorchOptimizer": lambda params, one: TorchOptimizer(params, one).step,
    "ZeRO": lambda params, one: ZeroRedundancyOptimizer(params, one).step,
    "local_optimizer": local,
    "step_hook": by_hook,
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
        step = DOORS[door](model.named_parameters(), OPTIMIZERS[name]())
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
