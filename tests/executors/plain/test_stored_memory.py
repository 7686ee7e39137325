"""Storages in bfloat16 by blocks: what is narrowed and widened goes into memory that is kept."""

import itertools
from typing import Any

import pytest
import torch

from functional_optim import adamw, lion, rmsprop, sgd, stored
from functional_optim.executors import blocked

from ...choices import case
from ..rules import TwoState, optimizer_of, two_init
from ..support import LARGE, assert_same, copied, new_tensors, noise, pure_steps, steps_in_place

pytestmark = pytest.mark.usefixtures("near_borders")
BASES = {
    "adamw": adamw(0.1, amsgrad=True),
    "momentum": sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "lion": lion(0.1),
    "rmsprop": rmsprop(0.1, momentum=0.9, centered=True),
}
CHOICES: list[dict[str, Any]] = [
    {"param": "bfloat16"},
    {"param": "bfloat16+master"},
    {"param": "bfloat16+kahan"},
    {"param": "bfloat16+stochastic"},
    {"state": "bfloat16"},
    {"state": "bfloat16+stochastic"},
    {"param": "bfloat16+kahan", "state": "bfloat16+stochastic"},
]


def test_a_step_allocates_nothing_after_the_first() -> None:
    for (base, plain), choice in itertools.product(BASES.items(), CHOICES):
        optimizer = stored(plain, **choice).using(executor="blocked")
        dtype = torch.bfloat16 if "param" in choice else torch.float32
        params, grads = ({"w": noise(k, LARGE).to(dtype)} for k in range(2))
        state, bound = optimizer.init(params), optimizer.bind(copied(params))
        for _ in range(2):
            with new_tensors() as made:
                optimizer.update_(params, grads, state)
                bound.step(grads)
                bound.step(bound.gradients)
        with case(base=base, **choice):
            assert made == []


def converts(p: Any, g: Any, s: Any, c: Any) -> Any:
    """Every way from one dtype to another and back, and copies."""
    wide = g.double() * 3.0
    whole = (g * 100.0).to(torch.int32).long().int().short().to(torch.int64)
    few = (g * 7.0).to(torch.int8).char()
    left = s.left.half().to(torch.float32) + wide.float() * s.right.bfloat16().to(p.dtype)
    right = whole.to(p.dtype) + few.type(torch.float32) + g.bool().type_as(p)
    kept = left.clone()
    return (p.contiguous() - c.lr * kept).to(p), TwoState(kept, right)


def fills(p: Any, g: Any, s: Any, c: Any) -> Any:
    same = torch.fill(s.left, c.lr)
    return torch.clone(p) - same * g, TwoState(torch.fill(g, 2), torch.fill(s.right, c.lr) + s.left)


def test_conversions_copies_and_fills_are_the_reference() -> None:
    params = {"w": noise(0, LARGE), "v": noise(1, 9)}
    given = {"w": noise(2, LARGE), "v": noise(3, 9)}
    for rule in (converts, fills):
        optimizer = optimizer_of(rule, state=TwoState, init=two_init)
        other = optimizer.using(executor="blocked")
        blocked._PROGRAMS.clear()
        got = pure_steps(other, params, lambda _: given)
        with case(rule=rule):
            assert_same(got, pure_steps(optimizer, params, lambda _: given))
            assert [one.allocating for one in blocked._PROGRAMS.values()] == [()]
            assert_same(steps_in_place(other, copied(params), lambda _: given), got)
