"""Hyper-parameters whose coefficients no float can hold: an error before anything changes."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from functional_optim import Optimizer, TorchOptimizer, add_noise, asgd, chain, partition, sgd

CHAINS = {
    "division by 0": (asgd(0.1, lambd=1.0, alpha=-math.inf), 1, "asgd.*step 1 .*alpha=-inf.*Zero"),
    "overflow": (chain(add_noise(gamma=1e30), sgd(0.1)), 2, "add_noise.*step 2 .*gamma=1e\\+30"),
    "in a partition": (
        partition({"a": sgd(0.1), "b": chain(add_noise(gamma=1e30), sgd(0.1))},
                  lambda path, shape: path[-1]),
        2,
        "add_noise.*step 2 .*gamma=1e\\+30",
    ),
}  # fmt: skip


def _pure(optimizer: Optimizer, params: dict[str, Tensor]) -> Callable[[], object]:
    state = optimizer.init(params)

    def step() -> None:
        nonlocal state
        made, state = optimizer.update(params, _ones(params), state)
        for name, value in made.items():
            params[name].copy_(value)

    return step


def _bound(optimizer: Optimizer, params: dict[str, Tensor]) -> Callable[[], object]:
    bound = optimizer.bind(params)
    return lambda: bound.step(_ones(params))


def _torch(optimizer: Optimizer, params: dict[str, Tensor]) -> Callable[[], object]:
    made = TorchOptimizer(params.items(), optimizer)

    def step() -> None:
        for param in params.values():
            param.grad = torch.ones_like(param)
        made.step()

    return step


def _ones(params: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.ones_like(one) for name, one in params.items()}


DOORS = {"update": _pure, "bind": _bound, "TorchOptimizer": _torch}
CASES = [(name, door) for name in CHAINS for door in DOORS]
CASES.remove(("in a partition", "bind"))  # it takes one chain for all parameters


@pytest.mark.parametrize("executor", ["auto", "reference"])
@pytest.mark.parametrize(("name", "door"), CASES)
def test_error_names_stage_step_and_values(name: str, door: str, executor: str) -> None:
    optimizer, failing, told = CHAINS[name]
    params = {"a": torch.ones(3), "b": torch.ones(2, 2)}
    step = DOORS[door](optimizer.using(executor=executor), params)
    for _ in range(failing - 1):
        step()
    before = {key: one.clone() for key, one in params.items()}
    for _ in range(2):  # the step count does not change either
        with pytest.raises(ValueError, match=told):
            step()
    assert all(map(torch.equal, params.values(), before.values()))
