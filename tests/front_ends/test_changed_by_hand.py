"""Options, state and learning rates changed by hand between steps, as torch's classes take it."""

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch

from functional_optim import TorchOptimizer, as_functional_optim

from .support import (
    CASES,
    CLASSES,
    Case,
    Twins,
    assert_same_tensors,
    parameters,
    params_of,
    twins,
)

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@every_case
def test_lr_changed_between_steps(case: Case) -> None:
    pair = twins(case)
    for seed, lr in enumerate([0.1, 0.01, 0.01, 0.5]):
        pair.each(lambda optimizer, lr=lr: optimizer.param_groups[0].update(lr=lr))
        pair.step(seed)
        pair.assert_same()


@every_case
def test_lr_changed_before_the_first_step(case: Case) -> None:
    # As a schedule with warm-up does when it is made.
    pair = twins(case)
    pair.each(lambda optimizer: optimizer.param_groups[0].update(lr=0.003))
    for seed in range(3):
        pair.step(seed)
        pair.assert_same()


def test_a_list_that_is_changed_in_place_is_seen() -> None:
    pair = twins(CASES["Adam"])
    pair.each(lambda optimizer: optimizer.param_groups[0].update(betas=[0.6, 0.7]))
    for seed, beta in enumerate([0.6, 0.1, 0.1, 0.9]):
        pair.each(
            lambda optimizer, beta=beta: optimizer.param_groups[0]["betas"].__setitem__(0, beta)
        )
        pair.step(seed)
        pair.assert_same()


@pytest.mark.parametrize("name", ["SGD momentum", "Adam", "RMSprop centered", "Rprop"])
def test_a_restart_by_clearing_the_state(name: str) -> None:
    pair = twins(CASES[name])
    restarts: list[Callable[[torch.optim.Optimizer], Any]] = [
        lambda optimizer: setattr(optimizer, "state", collections.defaultdict(dict)),
        lambda optimizer: optimizer.state.clear(),
        lambda optimizer: optimizer.state.pop(params_of(optimizer)[0]),
    ]
    for seed, restart in enumerate(restarts):
        pair.step(3 * seed)
        pair.each(restart)
        for more in (1, 2):
            pair.step(3 * seed + more)
            pair.assert_same()


def test_a_step_count_set_by_hand() -> None:
    pair = twins(CASES["Adam"])
    pair.step(0)
    for optimizer in (pair.ours, pair.theirs):
        for param in params_of(optimizer):
            optimizer.state[param]["step"] = torch.tensor(10.0)
    for seed in (1, 2):
        pair.step(seed)
        pair.assert_same()


def test_momentum_turned_on_and_off_again() -> None:
    pair = twins(CASES["SGD"])
    for seed, momentum in enumerate([0.0, 0.9, 0.9, 0.5, 0.0, 0.0]):
        pair.each(lambda one, m=momentum: one.param_groups[0].update(momentum=m, dampening=0.3))
        pair.step(seed)
        assert_same_tensors(params_of(pair.ours), params_of(pair.theirs))


def test_a_first_gradient_of_negative_zeros() -> None:
    pair = twins(CASES["SGD momentum"])
    for ours, theirs in pair.pairs:
        for param in (ours, theirs):
            param.data.fill_(-0.0)
            param.grad = torch.full_like(param, -0.0)
    pair.each(lambda optimizer: optimizer.step())
    pair.assert_same()


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_tensor_lr(cls: type[torch.optim.Optimizer], shape: tuple[int, ...]) -> None:
    theirs = cls(parameters(1), lr=torch.full(shape, 0.1), foreach=False)
    ours = TorchOptimizer(parameters(1), as_functional_optim(cls, lr=torch.full(shape, 0.1)))
    pair = Twins(theirs, ours)
    for seed in range(4):
        pair.step(seed)
        pair.assert_same()
        # Schedulers write into a tensor.
        pair.each(lambda optimizer: optimizer.param_groups[0]["lr"].mul_(0.5))
