"""Rules as a user writes them: rules that can be exported, and rules that cannot."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import NoState, Rule


class Hyper(NamedTuple):
    lr: float
    beta: float


class Average(NamedTuple):
    average: Tensor  # average of the gradient, with its shape


def init(param: Tensor, hyper: Hyper) -> Average:
    return Average(torch.zeros_like(param))


def signed_rule(param: Tensor, grad: Tensor, state: Average, c: Hyper) -> tuple[Tensor, Average]:
    """Pass plain numbers to functions of torch."""
    average = torch.lerp(grad, state.average, c.beta)
    return torch.add(param, average.sign(), alpha=-c.lr), Average(average)


SIGNED = Rule(name="signed", hyper=Hyper, state=Average, init=init, rule=signed_rule)


class OwnState(NamedTuple):
    start: Tensor  # the parameter before the first step
    pace: Tensor  # 0-d: a scalar of this leaf


def own_init(param: Tensor, hyper: Hyper) -> OwnState:
    return OwnState(param.clone(), torch.full((), 2.0, dtype=param.dtype))


def own_rule(param: Tensor, grad: Tensor, state: OwnState, c: Hyper) -> tuple[Tensor, OwnState]:
    """Use a scalar in the state of a leaf, and arithmetic with coefficients."""
    pace = state.pace * c.beta
    step = (grad * pace).clamp(-c.beta, c.beta) + 0.1 * (param - state.start)
    return param - c.lr * step, OwnState(state.start, pace)


OWN = Rule(name="own", hyper=Hyper, state=OwnState, init=own_init, rule=own_rule)


class RowState(NamedTuple):
    norms: Tensor  # sum of squares of each row so far, with a last dimension of 1


def row_init(param: Tensor, hyper: Hyper) -> RowState:
    return RowState(torch.zeros_like(param[..., :1]))


def row_rule(param: Tensor, grad: Tensor, state: RowState, c: Hyper) -> tuple[Tensor, RowState]:
    """Use the shapes of whole tensors."""
    norms = state.norms * c.beta + grad.square().sum(dim=-1, keepdim=True)
    size = grad.shape[-1] ** 0.5 if grad.dim() > 1 else 1.0
    return param - c.lr * size * grad / (norms.sqrt() + 1e-8), RowState(norms)


ROW = Rule(name="row", hyper=Hyper, state=RowState, init=row_init, rule=row_rule, kind="per_matrix")


def plain_rule(param: Tensor, grad: Tensor, state: NoState, c: Any) -> tuple[Tensor, NoState]:
    return param - c.lr * grad, state


class Choice(NamedTuple):
    lr: float
    slow: bool


def choice_rule(param: Tensor, grad: Tensor, state: NoState, c: Choice) -> tuple[Tensor, NoState]:
    return param - (c.lr / 2 if c.slow else c.lr) * grad, state


def slow_after_two(step: float, hyper: Hyper) -> Choice:
    return Choice(hyper.lr, step > 2)


def slow_if_large(step: float, hyper: Hyper) -> Choice:
    return Choice(hyper.lr, hyper.beta > 0.5)


def rooted(step: float, hyper: Hyper) -> Hyper:
    return Hyper(hyper.lr / math.sqrt(step), hyper.beta)


def halved_if_small(step: float, hyper: Hyper) -> Hyper:
    return Hyper(hyper.lr / 2 if hyper.beta < 0.1 else hyper.lr, hyper.beta)


def branching_rule(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    return (param - c.lr * grad if grad.sum() > 0 else param), state


def looking_rule(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    return (param - c.lr * grad if c.beta > 0.5 else param), state


CHANGING_CHOICE = Rule(
    name="changing_choice", hyper=Hyper, rule=choice_rule, coefficients=slow_after_two
)
FED_CHOICE = Rule(name="fed_choice", hyper=Hyper, rule=choice_rule, coefficients=slow_if_large)
ROOTED = Rule(name="rooted", hyper=Hyper, rule=plain_rule, coefficients=rooted)
HALVED = Rule(name="halved", hyper=Hyper, rule=plain_rule, coefficients=halved_if_small)
BRANCHING = Rule(name="branching", hyper=Hyper, rule=branching_rule)
LOOKING = Rule(name="looking", hyper=Hyper, rule=looking_rule)


def four_rule(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    scale = torch.arange(64, dtype=param.dtype)  # the length of the traced parameter
    return param - c.lr * c.beta * scale * grad, state


FIXED_LENGTH = Rule(name="fixed_length", hyper=Hyper, rule=four_rule)
