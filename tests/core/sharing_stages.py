"""Rules that return their inputs, views of their inputs, or one result twice."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import NoState, Optimizer, Rule, chain


class Hyper(NamedTuple):
    lr: float


class Last(NamedTuple):
    last: Tensor


class Pair(NamedTuple):
    one: Tensor
    other: Tensor


class Total(NamedTuple):
    total: Tensor


def zeros(param: Tensor, hyper: Hyper) -> Last:
    return Last(torch.zeros_like(param))


def optimistic(param: Tensor, grad: Tensor, state: Last, c: Hyper) -> tuple[Tensor, Last]:
    """Step by optimistic gradient descent, and return the given gradient as state."""
    return param - c.lr * (2 * grad - state.last), Last(grad)


def viewed(param: Tensor, grad: Tensor, state: Last, c: Hyper) -> tuple[Tensor, Last]:
    """Step as ``optimistic`` does, and return a view of the gradient as state."""
    return param - c.lr * (2 * grad - state.last), Last(grad.view(grad.shape).detach())


def previous(param: Tensor, grad: Tensor, state: Last, c: Hyper) -> tuple[Tensor, Last]:
    """Return the old parameter as state."""
    return param - c.lr * grad - 0.1 * (param - state.last), Last(param)


def shown_twice(param: Tensor, grad: Tensor, state: Last, c: Hyper) -> tuple[Tensor, Last]:
    """Return the new parameter as parameter and as state."""
    new = param - c.lr * grad + 0.1 * state.last
    return new, Last(new)


def swapped(param: Tensor, grad: Tensor, state: Pair, c: Hyper) -> tuple[Tensor, Pair]:
    """Return the two state tensors in swapped fields."""
    return param - c.lr * (grad + state.one), Pair(state.other, state.one)


def left_alone(param: Tensor, grad: Tensor, state: Last, c: Hyper) -> tuple[Tensor, Last]:
    return param, state


def idle(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    return param, state


def of_param(param: Tensor, hyper: Hyper) -> Last:
    return Last(param)


def of_detached(param: Tensor, hyper: Hyper) -> Last:
    return Last(param.detach())


def of_view(param: Tensor, hyper: Hyper) -> Last:
    return Last(param.detach().view_as(param))


def pair_of_one(param: Tensor, hyper: Hyper) -> Pair:
    made = torch.zeros_like(param)
    return Pair(made, made)


def pair(param: Tensor, hyper: Hyper) -> Pair:
    return Pair(torch.zeros_like(param), torch.ones_like(param))


def of(rule: Any, init: Any = zeros, state: Any = Last) -> Optimizer:
    stage = Rule(name=rule.__name__, hyper=Hyper, rule=rule, init=init, state=state)
    return chain(stage(lr=0.1))


SHARING: dict[str, Callable[[], Optimizer]] = {
    "the gradient": lambda: of(optimistic),
    "a view of the gradient": lambda: of(viewed),
    "the parameter": lambda: of(previous),
    "the result": lambda: of(shown_twice),
    "states in turn": lambda: of(swapped, pair, Pair),
    "init: the parameter": lambda: of(previous, of_param),
    "init: detached": lambda: of(previous, of_detached),
    "init: a view": lambda: of(previous, of_view),
    "init: one tensor twice": lambda: of(swapped, pair_of_one, Pair),
}
"""Optimizers whose rules return an input, or one result twice; all move the parameter."""

UNMOVED: dict[str, Callable[[], Optimizer]] = {
    "nothing new": lambda: of(left_alone),
    "no state": lambda: chain(Rule(name="idle", hyper=Hyper, rule=idle)(lr=0.1)),
}
"""Optimizers whose rules return the parameter unchanged."""
