"""Independence of steps from the values that earlier optimizers were given."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import Optimizer, Rule, chain
from functional_optim.testing import check_optimizer

from ...choices import case, pairs
from ..rules import RULES, Hyper


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
    """0.1 * 2.625 is 0.2617 in bfloat16. If 0.1 is rounded first, the product is 0.2637."""
    for one in pairs(first=[0.0, 1.0, 1.3125], executor=executors):
        optimizer = made(f"at {one['first']}").using(executor=one["executor"])
        for value in (one["first"], 1.3125):
            param = torch.zeros(3, dtype=torch.bfloat16)
            optimizer.update_(param, torch.full_like(param, value), optimizer.init(param))
        with case(**one):
            assert param.tolist() == [-0.26171875] * 3


def test_rules_of_a_user_s_own_keep_every_law_of_executors() -> None:
    laws = ["any history", "blocked is reference", "bound is reference"]
    rules = ("numbers_on_the_left", "powers")
    for optimizer in (made("left"), *(RULES[name] for name in rules)):
        with case(optimizer=optimizer):
            check_optimizer(lambda o=optimizer: o, laws=laws, max_examples=4)
