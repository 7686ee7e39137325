"""Rules and transforms as users write them, in a separate module."""

from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim import (
    Interval,
    NoState,
    Optimizer,
    Rule,
    Transform,
    adam,
    chain,
    clip_by_global_norm,
    decoupled_weight_decay,
    maximized,
)


class BallHyper(NamedTuple):
    lr: float
    decay: float
    slow: bool


class BallState(NamedTuple):
    velocity: Tensor  # has the parameter's shape
    slow_copy: list[Tensor]  # [a running average of the parameter]; [] without slow


class BallCoefficients(NamedTuple):
    lr: float
    weight: float  # weight of the new gradient, largest at the first step
    decay: float
    slow: bool


def ball_init(param: Tensor, hyper: BallHyper) -> BallState:
    return BallState(torch.zeros_like(param), [param.clone()] if hyper.slow else [])


def ball_coefficients(step: float, hyper: BallHyper) -> BallCoefficients:
    return BallCoefficients(hyper.lr, 1.0 / step**0.5, hyper.decay, hyper.slow)


def ball_rule(
    param: Tensor, grad: Tensor, state: BallState, c: BallCoefficients
) -> tuple[Tensor, BallState]:
    velocity = state.velocity * c.decay + grad * c.weight
    param = param - velocity * c.lr
    copy = state.slow_copy
    if c.slow:
        copy = [copy[0] * 0.9 + param * 0.1]
        param = (param + copy[0]) / 2
    return param, BallState(velocity, copy)


BALL = Rule(
    name="ball",
    hyper=BallHyper,
    state=BallState,
    init=ball_init,
    coefficients=ball_coefficients,
    rule=ball_rule,
    bounds=(("decay", Interval(0.0, 1.0, high_open=True)),),
)


class SmoothHyper(NamedTuple):
    beta: float


class SmoothState(NamedTuple):
    average: Tensor  # average of the gradient, with its shape


def smooth_init(param: Tensor, hyper: SmoothHyper) -> SmoothState:
    return SmoothState(torch.zeros_like(param))


def smooth_transform(
    grad: Tensor, param: Tensor, state: SmoothState, c: SmoothHyper
) -> tuple[Tensor, SmoothState]:
    average = torch.lerp(state.average, grad, 1 - c.beta)
    return average, SmoothState(average)


SMOOTH = Transform(
    name="smooth",
    hyper=SmoothHyper,
    state=SmoothState,
    init=smooth_init,
    transform=smooth_transform,
)


class BudgetHyper(NamedTuple):
    budget: float


class BudgetState(NamedTuple):
    spent: Tensor  # the part of the gradient that each element has lost


def absolute_sum(grad: Tensor) -> Tensor:
    return grad.to(torch.float64).abs().sum()


def budget_init(param: Tensor, hyper: BudgetHyper) -> BudgetState:
    return BudgetState(torch.zeros_like(param))


def budget_transform(
    grad: Tensor, param: Tensor, state: BudgetState, c: BudgetHyper, total: Tensor
) -> tuple[Tensor, BudgetState]:
    kept = grad * (c.budget / (c.budget + total)).to(grad.dtype)
    return kept, BudgetState(state.spent + (grad - kept))


BUDGET = Transform(
    name="budget",
    hyper=BudgetHyper,
    state=BudgetState,
    init=budget_init,
    transform=budget_transform,
    measure=absolute_sum,
)


class RowHyper(NamedTuple):
    lr: float


class RowState(NamedTuple):
    norms: Tensor  # sum of squares of each row so far, (rows, 1)


def row_init(param: Tensor, hyper: RowHyper) -> RowState:
    return RowState(torch.zeros_like(param[:, :1]))


def row_rule(param: Tensor, grad: Tensor, state: RowState, c: RowHyper) -> tuple[Tensor, RowState]:
    norms = state.norms + grad.square().sum(dim=1, keepdim=True)
    return param - c.lr * grad / (norms.sqrt() + 1e-8), RowState(norms)


ROW = Rule(
    name="row", hyper=RowHyper, state=RowState, init=row_init, rule=row_rule, kind="per_matrix"
)


class SignHyper(NamedTuple):
    lr: float


def sign_rule(param: Tensor, grad: Tensor, state: NoState, c: SignHyper) -> tuple[Tensor, NoState]:
    return param - c.lr * grad.sign(), state


SIGN = Rule(name="sign", hyper=SignHyper, rule=sign_rule)


class PacedState(NamedTuple):
    pace: Tensor  # 0-d, halved at every step


def paced_init(param: Tensor, hyper: SignHyper) -> PacedState:
    return PacedState(torch.ones((), dtype=param.dtype))


def paced_rule(
    param: Tensor, grad: Tensor, state: PacedState, c: SignHyper
) -> tuple[Tensor, PacedState]:
    pace = state.pace / 2
    return param - c.lr * pace * grad, PacedState(pace)


PACED = Rule(name="paced", hyper=SignHyper, state=PacedState, init=paced_init, rule=paced_rule)

CUSTOM: dict[str, Optimizer] = {
    "rule": chain(BALL(lr=0.1, decay=0.9, slow=False)),
    "rule with a list": chain(BALL(lr=0.1, decay=0.9, slow=True)),
    "transform": chain(SMOOTH(beta=0.9), adam(0.1)),
    "measured at the start": chain(BUDGET(budget=2.0), BALL(lr=0.1, decay=0.9, slow=True)),
    "measured in the middle": chain(
        SMOOTH(beta=0.5),
        decoupled_weight_decay(0.1),
        BUDGET(budget=2.0),
        clip_by_global_norm(0.5),
        BALL(lr=0.1, decay=0.9, slow=True),
    ),
    "states on both sides of a rule": chain(
        BALL(lr=0.1, decay=0.5, slow=True), BUDGET(budget=1.0), SMOOTH(beta=0.9), adam(0.1)
    ),
    "per matrix": chain(maximized(), BUDGET(budget=2.0), ROW(lr=0.1)),
    "no state": chain(SIGN(lr=0.1)),
}
"""Chains of these stages, with every kind of stage at every position."""
