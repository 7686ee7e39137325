"""Leaves are not joined or cut if torch's rounding depends on the position of an element."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ...choices import case
from ..rules import stateless
from ..support import assert_same

Rule = Callable[..., Any]
RULES: dict[str, Rule] = {
    "atan2": lambda p, g, s, c: (p - c.lr * torch.atan2(p, g), s),
    "sigmoid": lambda p, g, s, c: (p - c.lr * g.sigmoid(), s),
    "silu": lambda p, g, s, c: (p - c.lr * functional.silu(g), s),
    "add(tensor, number, alpha=...)": lambda p, g, s, c: (torch.add(p, 0.3, alpha=c.lr) - g, s),
    "sub(tensor, number, alpha=...)": lambda p, g, s, c: (p.sub(c.lr, alpha=0.7) - g, s),
    "pow with this exponent": lambda p, g, s, c: (p - c.lr * g.abs() ** c.lr, s),
}
EXECUTORS = ("auto", "blocked", "compiled")
LENGTHS = (3, 17, 33, 1_001, 4_999)


def leaves(seed: int, dtype: torch.dtype) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    made = [torch.randn(n, generator=drawn, dtype=torch.float64) for n in LENGTHS]
    made.append(torch.randn(31, 50, generator=drawn, dtype=torch.float64).t())
    return [one.to(dtype) for one in made]


def require_same(rule: Rule, grads: list[Tensor], *, bound: bool) -> None:
    optimizer = stateless(rule)
    dtype = grads[0].dtype
    want = optimizer.using(executor="reference").update(
        leaves(1, dtype), grads, optimizer.init(leaves(1, dtype))
    )[0]
    for executor in EXECUTORS:
        with case(executor=executor, dtype=dtype):
            other = optimizer.using(executor=executor)
            params = leaves(1, dtype)
            state = other.init(params)
            assert_same(other.update(params, grads, state)[0], want)
            other.update_(params, grads, state)
            assert_same(params, want)
            if bound:
                own = other.bind(leaves(1, dtype))
                own.step(grads)
                assert_same(own.params, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_they_are_the_reference_bit_for_bit(dtype: torch.dtype) -> None:
    """Fault 13: joined or cut leaves were off by a unit in the last place."""
    for name, rule in RULES.items():
        with case(name=name):
            require_same(rule, leaves(2, dtype), bound=True)
            said = stateless(rule).using(executor="auto").explain(leaves(1, dtype))
            assert f"one by one; torch rounds {name} by where" in said


def test_an_expanded_gradient_is_not_copied_before_it_is_read() -> None:
    """Fault 13: torch treats an expanded tensor as a number, so a copy rounds differently."""
    rules: tuple[Rule, ...] = (
        lambda p, g, s, c: (torch.sub(p, g, alpha=c.lr), s),
        lambda p, g, s, c: (torch.add(p, g, alpha=-c.lr), s),
    )
    for number, rule in enumerate(rules):
        with case(rule=number):
            params = leaves(1, torch.float32)
            grads = [torch.randn(()).expand(one.shape) for one in params]
            require_same(rule, grads, bound=False)


def test_a_rule_that_begins_to_round_so_is_told_from_one_that_does_not() -> None:
    optimizer = stateless(lambda p, g, s, c: (p - c.lr * g.abs() ** 2.0, s))
    said = optimizer.using(executor="blocked").explain([torch.ones(3)])
    assert "blocked" in said and "one by one" not in said
