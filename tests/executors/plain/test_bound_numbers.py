"""Coefficients of a bound step follow its step number and the current hyper-parameters."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from functional_optim import NoState, Rule, chain, sgd

from ..support import noise


class Hyper(NamedTuple):
    lr: float


CALLS: list[str] = []


def seen(step: float, hyper: Hyper) -> Hyper:
    CALLS.append("seen")
    return Hyper(hyper.lr / step)


def unseen(step: float, hyper: Hyper) -> Hyper:
    CALLS.append("unseen")
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
    CALLS.clear()
    for lr in (1.0, 0.5):
        bound.set_hyper(lr=lr)
        for _ in range(3):
            bound.step(bound.gradients)
    assert [function.__name__] * 6 == CALLS  # once for each step
    steps = [1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5]
    for k, lr in enumerate(steps):
        want = want - (lr / (k + 1) if function is seen else lr) * torch.ones(8)
    assert torch.equal(params, want)


def test_a_schedule_in_the_place_of_a_number_is_asked_from_then_on() -> None:
    """Each step calls the schedule, until a number replaces the schedule."""
    bound = sgd(0.5).using(executor="blocked").bind(params := noise(0, 8))
    bound.gradients.fill_(1.0)
    want, asked = noise(0, 8), []

    def halving(made: float) -> float:
        asked.append(made)
        return 0.5 ** (made + 1.0)

    for lr, rates in ((0.5, [0.5] * 2), (halving, [0.125, 0.0625]), (0.25, [0.25] * 2)):
        bound.set_hyper(lr=lr)
        for rate in rates:
            asked.clear()
            bound.step(bound.gradients)
            assert len(asked) == (lr is halving)
            want = want - rate * torch.ones(8)
            assert torch.equal(params, want)
