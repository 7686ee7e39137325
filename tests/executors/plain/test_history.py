"""What is remembered for all does not depend on whose values came first (fault 5)."""

import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import Optimizer, Rule, chain
from functional_optim.stage import Link
from functional_optim.testing import check_optimizer

from ...choices import case, pairs
from ..rules import RULES, Hyper
from ..support import assert_same, noise

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_NAMES = itertools.count()


def unknown(optimizer: Optimizer) -> Optimizer:
    """The same chain under a name that no cache has seen."""
    number = next(_NAMES)
    links = tuple(
        Link(replace(link.stage, name=f"{link.stage.name} {number}"), link.hyper)
        for link in optimizer.links
    )
    return replace(optimizer, links=links)


def params(dtype: torch.dtype) -> dict[str, Tensor]:
    return {"s": noise(2, dtype=dtype), "w": noise(1, 5, 7, dtype=dtype)}


def grads(step: int, dtype: torch.dtype) -> dict[str, Tensor]:
    return {"s": noise(20 + step, dtype=dtype), "w": noise(10 + step, 5, 7, dtype=dtype)}


def stepped(optimizer: Optimizer, dtype: torch.dtype) -> Any:
    given = params(dtype)
    state = optimizer.init(given)
    for step in range(3):
        optimizer.update_(given, grads(step, dtype), state)
    return given, state


def stepped_by_program(optimizer: Optimizer, dtype: torch.dtype) -> Any:
    given = params(dtype)
    program = optimizer.script(given)
    for step in range(3):
        program.step([*grads(step, dtype).values()])
    return given, program.state


def test_those_before_with_plain_values_make_no_difference(executors: Any) -> None:
    """Zeros, and a learning rate that rounding leaves alone (fault 5)."""
    chosen = [one for one in executors if one in ("blocked", "script")]
    for one in pairs(name=RULES, dtype=DTYPES, executor=chosen):
        with case(**one):
            optimizer, dtype = unknown(RULES[one["name"]]), one["dtype"]
            want = stepped(optimizer, dtype)
            other = optimizer.using(executor=one["executor"])
            before = other.replace(lr=0.5)
            zeros, given = (
                {key: torch.zeros_like(value) for key, value in params(dtype).items()}
                for _ in range(2)
            )
            before.update_(zeros, given, before.init(zeros))
            assert_same(stepped(other, dtype), want)
            if one["executor"] == "script":
                assert_same(stepped_by_program(other, dtype), want)


class Last(NamedTuple):
    last: Tensor


def last_init(param: Tensor, hyper: Hyper) -> Last:
    return Last(torch.zeros_like(param))


def optimistic(param: Tensor, grad: Tensor, state: Last, c: Hyper) -> tuple[Tensor, Last]:
    return param - c.lr * (2 * grad - state.last), Last(grad.clone())


def made(name: str) -> Optimizer:
    rule = Rule(name=name, hyper=Hyper, state=Last, init=last_init, rule=optimistic)
    return chain(rule(lr=0.1))


def test_numbers_on_the_left_are_not_rounded_to_16_bits(executors: Any) -> None:
    """0.1 * 2.625 is 0.2617 in bfloat16, and 0.2637 where 0.1 is rounded before (fault 5)."""
    for one in pairs(first=[0.0, 1.0, 1.3125], executor=executors):
        optimizer = made(f"at {one['first']}").using(executor=one["executor"])
        for value in (one["first"], 1.3125):
            param = torch.zeros(3, dtype=torch.bfloat16)
            optimizer.update_(param, torch.full_like(param, value), optimizer.init(param))
        with case(**one):
            assert param.tolist() == [-0.26171875] * 3


def test_a_rule_with_numbers_on_the_left_keeps_every_law_of_executors() -> None:
    """(fault 5)"""
    laws = ["any history", "blocked is reference", "bound is reference"]
    check_optimizer(lambda: made("left"), laws=laws, max_examples=10)
