"""What a bound optimizer says of parameters that it steps one by one."""

from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import NoState, Rule, adamw, chain, stored

from .rules import Hyper, OneState
from .support import assert_same, noise


def by_its_norm(p: Tensor, g: Tensor, s: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    return p - c.lr * g / (1.0 + g.square().sum().sqrt()), s


def with_a_row_more(p: Tensor, g: Tensor, s: OneState, c: Hyper) -> tuple[Tensor, OneState]:
    return p - c.lr * g, OneState(s.kept + 1.0)


def one_number(p: Tensor, hyper: Any) -> OneState:
    return OneState(torch.zeros((), dtype=p.dtype, device=p.device))


NORMED = Rule(name="normed", hyper=Hyper, rule=by_its_norm, kind="per_matrix")
COUNTING = Rule(name="counting", hyper=Hyper, state=OneState, init=one_number, rule=with_a_row_more)


def tree() -> dict[str, Tensor]:
    return {"a": noise(0, 3, 4), "b": noise(1, 4, 300).t(), "c": noise(2, 300)}


@pytest.mark.parametrize("executor", ["reference", "blocked", "compile", "auto"])
def test_a_rule_that_needs_whole_tensors_gets_them(executor: Any) -> None:
    """In their own shapes, of the same layout."""
    optimizer = chain(NORMED(lr=0.1)).using(executor=executor)
    given = {name: torch.ones_like(one) for name, one in tree().items()}
    want, _ = optimizer.update(tree(), given, optimizer.init(tree()))
    bound = optimizer.bind(tree())
    bound.step(given)
    assert_same(bound.params, want)
    assert bound.explain() == "3 parameters are stepped one by one: normed needs its whole tensor"


def test_each_reason_has_a_line() -> None:
    turned = noise(1, 4, 300).t().clone()
    assert not turned.is_contiguous()
    bound = stored(adamw(0.1), state="int8").bind({"plain": noise(0, 300), "turned": turned})
    assert bound.explain().endswith(
        "1 parameter is stepped one by one: its elements do not lie in the order of its shape, and "
        "the chain works in blocks"
    )
    view = noise(2, 6)[1:4]
    said = adamw(0.1).bind({"a": noise(0, 3), "b": view}).explain().splitlines()
    assert said[1:] == ["1 parameter is stepped one by one: it is a view of another tensor"]
    said = chain(COUNTING(lr=0.1)).bind(tree()).explain().splitlines()
    assert "2 parameters are stepped one by one: its state has another shape" in said
