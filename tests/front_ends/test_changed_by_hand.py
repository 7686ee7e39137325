"""Options and state changed by hand between steps, as torch's classes take it."""

import collections
from collections.abc import Callable
from typing import Any

import torch

from tests.choices import each

from .support import FLAT, assert_same_params, params_of, twins


@each(flat=FLAT)
def test_a_list_that_is_changed_in_place_is_seen(flat: bool) -> None:
    pair = twins("Adam", flat=flat)
    pair.each(lambda optimizer: optimizer.param_groups[0].update(betas=[0.6, 0.7]))
    for seed, beta in enumerate([0.6, 0.1, 0.1, 0.9]):
        pair.each(lambda one, beta=beta: one.param_groups[0]["betas"].__setitem__(0, beta))
        pair.step(seed)
        pair.assert_same()


RESTARTS: list[Callable[[torch.optim.Optimizer], Any]] = [
    lambda optimizer: setattr(optimizer, "state", collections.defaultdict(dict)),
    lambda optimizer: optimizer.state.clear(),
    lambda optimizer: optimizer.state.pop(params_of(optimizer)[0]),
]


@each(name=["SGD momentum", "Adam", "RMSprop centered", "Rprop"], flat=FLAT)
def test_a_restart_by_clearing_the_state(name: str, flat: bool) -> None:
    pair = twins(name, flat=flat)
    for seed, restart in enumerate(RESTARTS):
        pair.step(3 * seed)
        pair.each(restart)
        for more in (1, 2):
            pair.step(3 * seed + more)
            pair.assert_same()


@each(flat=FLAT)
def test_a_step_count_set_by_hand(flat: bool) -> None:
    pair = twins("Adam", flat=flat)
    pair.step(0)
    for optimizer in pair.both:
        for param in params_of(optimizer):
            optimizer.state[param]["step"] = torch.tensor(10.0)
    for seed in (1, 2):
        pair.step(seed)
        pair.assert_same()


@each(flat=FLAT)
def test_momentum_turned_on_and_off_again(flat: bool) -> None:
    pair = twins("SGD", flat=flat)
    for seed, momentum in enumerate([0.0, 0.9, 0.9, 0.5, 0.0, 0.0]):
        pair.each(lambda one, m=momentum: one.param_groups[0].update(momentum=m, dampening=0.3))
        pair.step(seed)
        assert_same_params(pair.ours, pair.theirs)


@each(flat=FLAT)
def test_a_first_gradient_of_negative_zeros(flat: bool) -> None:
    pair = twins("SGD momentum", flat=flat)
    for optimizer in pair.both:
        for param in params_of(optimizer):
            param.data.fill_(-0.0)
            param.grad = torch.full_like(param, -0.0)
        optimizer.step()
    pair.assert_same()
