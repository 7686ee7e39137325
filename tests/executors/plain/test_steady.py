"""Coefficients that take no notice of the step are computed once; all others at each step."""

import sys
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from functional_optim import NoState, Rule, adamw, chain, lion, sgd
from functional_optim.engine import coefficients_at
from functional_optim.steady import coefficients_of, takes_notice

from ...choices import case
from ..support import noise


def handed_on(step: float, hyper: Any) -> Any:
    return hyper


def by_name(step: float, hyper: Any) -> Any:
    return locals()["step"]


def by_frame(step: float, hyper: Any) -> Any:
    return sys._getframe().f_locals["step"]


def inside(step: float, hyper: Any) -> Any:
    def within() -> float:
        return step

    return within()


def counted(step: float, hyper: Any) -> Any:
    step += 1
    return step


class Called:
    def __call__(self, step: float, hyper: Any) -> Any:
        return step


NOTICING = [by_name, by_frame, inside, counted, Called(), partial(handed_on, 1.0), lambda *_: 0.0]


def test_whatever_may_look_at_the_step_takes_notice() -> None:
    for function in NOTICING:
        with case(function=function):
            assert takes_notice(function)
    assert not takes_notice(handed_on)
    assert not takes_notice(lambda step, hyper: hyper.lr * 2)


def test_they_are_those_of_every_step() -> None:
    for optimizer in (sgd(0.1, momentum=0.9, dampening=0.5), adamw(0.1), lion()):
        hypers = tuple(link.hyper for link in optimizer.links)
        found = coefficients_of(optimizer.stages, hypers)
        for step in (1.0, 2.0, 30.0):
            with case(optimizer=optimizer, step=step):
                assert found(step) == coefficients_at(optimizer.stages, hypers, step)[1]


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


@pytest.mark.parametrize(("function", "calls"), [(seen, 6), (unseen, 2)])
def test_a_new_hyper_parameter_is_not_forgotten(function: Any, calls: int) -> None:
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
    assert len(CALLS) == calls
    steps = [1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5]
    for k, lr in enumerate(steps):
        want = want - (lr / (k + 1) if function is seen else lr) * torch.ones(8)
    assert torch.equal(params, want)
