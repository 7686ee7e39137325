"""Coefficients of a bound step are those of its number and of the hyper-parameters of now."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from functional_optim import NoState, Rule, chain

from ..support import noise


class Hyper(NamedTuple):
    lr: float


def seen(step: float, hyper: Hyper) -> Hyper:
    return Hyper(hyper.lr / step)


def unseen(step: float, hyper: Hyper) -> Hyper:
    return hyper


def down(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    return param - c.lr * grad, state


@pytest.mark.parametrize("function", [seen, unseen])
def test_a_new_hyper_parameter_is_not_forgotten(function: Any) -> None:
    rule = Rule(name="down", hyper=Hyper, rule=down, coefficients=function)
    bound = chain(rule(lr=1.0)).using(executor="blocked").bind(params := noise(0, 8))
    bound.gradients.fill_(1.0)
    want = noise(0, 8)
    bound.step(bound.gradients)
    for lr in (1.0, 0.5):
        bound.set_hyper(lr=lr)
        for _ in range(3):
            bound.step(bound.gradients)
    steps = [1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5]
    for k, lr in enumerate(steps):
        want = want - (lr / (k + 1) if function is seen else lr) * torch.ones(8)
    assert torch.equal(params, want)
