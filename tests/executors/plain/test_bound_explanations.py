"""Explanations of a bound optimizer for parameters that it steps one by one."""

import torch
from torch import Tensor

from functional_optim import NoState, adamw, stored

from ...choices import case
from ..rules import Hyper, OneState, optimizer_of, stateless
from ..support import assert_same, noise


def by_its_norm(p: Tensor, g: Tensor, s: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    return p - c.lr * g / (1.0 + g.square().sum().sqrt()), s


NORMED = stateless(by_its_norm, "normed", kind="per_matrix")
COUNTING = optimizer_of(
    lambda p, g, s, c: (p - c.lr * g, OneState(s.kept + 1.0)),
    init=lambda p, hyper: OneState(torch.zeros((), dtype=p.dtype, device=p.device)),
)


def tree() -> dict[str, Tensor]:
    return {"a": noise(0, 3, 4), "b": noise(1, 4, 300).t(), "c": noise(2, 300)}


def test_a_rule_that_needs_whole_tensors_gets_them() -> None:
    """A rule for whole tensors gets each parameter in its own shape and layout."""
    given = {name: torch.ones_like(one) for name, one in tree().items()}
    want, _ = NORMED.update(tree(), given, NORMED.init(tree()))
    for executor in ("reference", "blocked", "compiled", "auto"):
        with case(executor=executor):
            bound = NORMED.using(executor=executor).bind(tree())
            bound.step(given)
            assert_same(bound.params, want)
            said = "3 parameters are stepped one by one: normed needs its whole tensor"
            assert bound.explain() == said


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
    said = COUNTING.bind(tree()).explain().splitlines()
    assert "2 parameters are stepped one by one: its state has another shape" in said
