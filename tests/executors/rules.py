"""Rules as users write them, each with a detail that an executor could get wrong."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from functional_optim import (
    Rule,
    adadelta,
    adagrad,
    adam,
    adamax,
    adamw,
    ftrl,
    lion,
    qhm,
    rmsprop,
    rprop,
    sgd,
)
from functional_optim.composition import chain
from functional_optim.optimizer import Optimizer


class Hyper(NamedTuple):
    lr: float


class OneState(NamedTuple):
    kept: Tensor  # has the parameter's shape and dtype


class TwoState(NamedTuple):
    left: Tensor  # has the parameter's shape and dtype
    right: Tensor  # has the parameter's shape and dtype


def one_init(param: Tensor, hyper: Hyper) -> OneState:
    return OneState(torch.full_like(param, 0.5))


def two_init(param: Tensor, hyper: Hyper) -> TwoState:
    return TwoState(torch.full_like(param, 0.25), torch.full_like(param, -2.0))


def keep_old_param(
    param: Tensor, grad: Tensor, state: OneState, c: Hyper
) -> tuple[Tensor, OneState]:
    return param - c.lr * (grad + state.kept), OneState(param)


def keep_view_of_old_param(
    param: Tensor, grad: Tensor, state: OneState, c: Hyper
) -> tuple[Tensor, OneState]:
    return param - c.lr * (grad + state.kept), OneState(param.detach())


def exchange_param_and_state(
    param: Tensor, grad: Tensor, state: OneState, c: Hyper
) -> tuple[Tensor, OneState]:
    return state.kept, OneState(param)


def keep_grad(param: Tensor, grad: Tensor, state: OneState, c: Hyper) -> tuple[Tensor, OneState]:
    return param - c.lr * state.kept, OneState(grad)


def become_grad(param: Tensor, grad: Tensor, state: OneState, c: Hyper) -> tuple[Tensor, OneState]:
    return grad, OneState(state.kept + c.lr * param)


def keep_all(param: Tensor, grad: Tensor, state: OneState, c: Hyper) -> tuple[Tensor, OneState]:
    return param, state


def swap(param: Tensor, grad: Tensor, state: TwoState, c: Hyper) -> tuple[Tensor, TwoState]:
    return param - c.lr * (state.left - grad), TwoState(state.right, state.left)


def rotate(param: Tensor, grad: Tensor, state: TwoState, c: Hyper) -> tuple[Tensor, TwoState]:
    return state.left, TwoState(state.right, param)


def shift_history(
    param: Tensor, grad: Tensor, state: TwoState, c: Hyper
) -> tuple[Tensor, TwoState]:
    return param - c.lr * (state.left + state.right), TwoState(grad, state.left)


def same_in_both(param: Tensor, grad: Tensor, state: TwoState, c: Hyper) -> tuple[Tensor, TwoState]:
    new = state.left * c.lr + grad
    return param - new, TwoState(new, new)


def same_everywhere(
    param: Tensor, grad: Tensor, state: TwoState, c: Hyper
) -> tuple[Tensor, TwoState]:
    new = param - c.lr * grad
    return new, TwoState(new, new)


def views_of_results(
    param: Tensor, grad: Tensor, state: TwoState, c: Hyper
) -> tuple[Tensor, TwoState]:
    new = state.left * c.lr + grad
    seen = new.view_as(param)
    return param - seen, TwoState(seen, state.left.reshape(-1).view_as(param))


def numbers_on_the_left(
    param: Tensor, grad: Tensor, state: TwoState, c: Hyper
) -> tuple[Tensor, TwoState]:
    size = grad.abs() + 0.75
    left = (1.0 - c.lr) * state.left + 3.0 / size
    right = 1.0 - size - (0.1 - state.right)
    return param - c.lr * (2.0 * left + right), TwoState(left, right)


def selects(param: Tensor, grad: Tensor, state: TwoState, c: Hyper) -> tuple[Tensor, TwoState]:
    positive = (grad > 0) & (state.left <= state.right) | ~(param != grad)
    left = torch.where(positive, grad, state.left)
    right = state.right.masked_fill(positive, c.lr)
    return torch.where(grad.abs() < 1.0, param - c.lr * left, param), TwoState(left, right)


def powers(param: Tensor, grad: Tensor, state: TwoState, c: Hyper) -> tuple[Tensor, TwoState]:
    left = state.left**2 + grad.abs() ** 0.5
    right = (state.right.square() + 1.0).rsqrt() + left.sqrt()
    return param - c.lr * left / (right**3 + 1.0), TwoState(left, right)


def library(param: Tensor, grad: Tensor, state: OneState, c: Hyper) -> tuple[Tensor, OneState]:
    kept = functional.relu(grad) + functional.hardtanh(state.kept)
    return param - c.lr * torch.clamp(kept, -1.0, 1.0), OneState(torch.nan_to_num(kept))


def reuses(param: Tensor, grad: Tensor, state: TwoState, c: Hyper) -> tuple[Tensor, TwoState]:
    a = param * grad
    b = a - state.left
    d = b * a
    param = param - c.lr * d
    left = param * a + b
    right = left - state.right * d
    return param + a * 0.125, TwoState(left, right)


def dead_code(param: Tensor, grad: Tensor, state: OneState, c: Hyper) -> tuple[Tensor, OneState]:
    _ = (param / 0.0).exp() * state.kept
    return param - c.lr * grad, OneState(state.kept * 2.0)


def repeats(param: Tensor, grad: Tensor, state: OneState, c: Hyper) -> tuple[Tensor, OneState]:
    a = grad * 0.0 + param * 1
    b = grad * -0.0 + param * 1.0
    return a - c.lr * grad * grad, OneState(b / state.kept + grad * grad)


Function = Callable[[Tensor, Tensor, OneState, Any], tuple[Tensor, OneState]]
TEMPLATE = Rule(name="mine", hyper=Hyper, state=OneState, init=one_init, rule=lambda *_: _)


def optimizer_of(rule: Callable[..., Any], **fields: Any) -> Optimizer:
    """Return a chain of one rule, with one state by default."""
    return chain(replace(TEMPLATE, rule=rule, **fields)(lr=0.3))


def stateless(rule: Callable[..., Any], name: str = "mine", **fields: Any) -> Optimizer:
    """Return a chain of one rule without state."""
    return chain(Rule(name=name, hyper=Hyper, rule=rule, **fields)(lr=0.3))


ONE = (
    keep_old_param,
    keep_view_of_old_param,
    exchange_param_and_state,
    keep_grad,
    become_grad,
    keep_all,
    library,
    dead_code,
    repeats,
)
TWO = (
    swap,
    rotate,
    shift_history,
    same_in_both,
    same_everywhere,
    views_of_results,
    numbers_on_the_left,
    selects,
    powers,
    reuses,
)

RULES: dict[str, Optimizer] = {
    **{one.__name__: optimizer_of(one, name=one.__name__) for one in ONE},
    **{
        one.__name__: optimizer_of(one, name=one.__name__, state=TwoState, init=two_init)
        for one in TWO
    },
}
"""Pointwise rules by name, which every executor must run."""

VARIANTS: dict[str, Optimizer] = {
    "adadelta": adadelta(weight_decay=0.1),
    "adagrad": adagrad(0.1, lr_decay=0.2, weight_decay=0.1, initial_accumulator_value=0.3),
    "adam amsgrad": adam(0.1, (0.5, 0.6), 1e-4, 0.1, True, maximize=True),
    "adamax": adamax(0.1, weight_decay=0.1),
    "adamw": adamw(0.1, weight_decay=0.2),
    "ftrl": ftrl(0.1, l1=0.1, l2=0.2, maximize=True),
    "lion": lion(0.1, weight_decay=0.2),
    "qhm direct": qhm(0.1, 0.9, 0.3, 0.1, weight_decay_type="direct", maximize=True),
    "rmsprop centered": rmsprop(0.1, weight_decay=0.1, momentum=0.9, centered=True),
    "rprop": rprop(0.1),
    "sgd nesterov": sgd(0.1, momentum=0.9, nesterov=True),
}
"""Algorithms of this package, with options that take effect."""
