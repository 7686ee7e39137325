"""Totals of the same stage in several parts: each part uses its own total."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import Optimizer, chain, clip_by_global_norm, partition, sgd
from functional_optim.frontends.local_optimizer import local_optimizer
from tests.choices import each


def total(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def label(path: tuple[Any, ...], shape: tuple[int, ...]) -> str:
    return str(path[0])[0]


def clipped(lr: float) -> Optimizer:
    return chain(clip_by_global_norm(1.0), sgd(lr=lr))


PARTS = partition({"a": clipped(0.5), "b": clipped(1.0)}, label)


@each(executor=["auto", "reference"], in_place=[True, False])
def test_a_part_that_is_stepped_alone_takes_its_own_total(executor: Any, in_place: bool) -> None:
    """A part uses its own total if the other part has no gradient on this rank."""
    optimizer = PARTS.using(executor=executor)
    params: Any = {"a": torch.zeros(2), "b": torch.zeros(4)}
    grads = {"a": None, "b": torch.full((4,), 2.0)}
    state, totals = optimizer.init(params), (total(9.0), total(64.0))
    for step in range(1, 4):
        if in_place:
            optimizer.update_(params, grads, state, measured=totals)
        else:
            params, state = optimizer.update(params, grads, state, measured=totals)
        torch.testing.assert_close(params["b"], torch.full((4,), -0.25 * step))
    assert optimizer.measure(params, grads, state).item() == 0.0
    assert optimizer.measure(params, grads, state, measured=totals[:1]).item() == 16.0


def test_addends_are_those_of_the_total_that_is_asked_for() -> None:
    named = {name: torch.zeros(2) for name in ("a", "b1", "b2")}
    local = local_optimizer(PARTS, named.items())
    grads = [None, torch.full((2,), 2.0), torch.full((2,), 3.0)]
    for _ in range(3):  # later steps reuse the plan
        assert local.measure(grads).tolist() == [0.0, 0.0, 0.0]
        found = local.measure(grads, measured=[total(0.0)])
        torch.testing.assert_close(found, torch.tensor([0.0, 8.0, 18.0], dtype=torch.float64))
        local.step_by(grads, measured=[total(0.0), found.sum()])
    for name, value in (("b1", 2.0), ("b2", 3.0)):
        want = torch.full((2,), -3 * value / 26.0**0.5)
        torch.testing.assert_close(named[name], want)


TOO_MANY: dict[str, tuple[Callable[[], Optimizer], Any, type[Exception]]] = {
    "none is needed": (lambda: sgd(lr=0.1), (total(1.0),), ValueError),
    "more than needed": (lambda: clipped(0.1), (total(1.0), total(2.0)), ValueError),
    "no tensor": (lambda: clipped(0.1), (1.0,), TypeError),
}


@pytest.mark.parametrize("name", TOO_MANY)
def test_totals_that_do_not_fit_are_refused_by_planned_steps_too(name: str) -> None:
    make, measured, error = TOO_MANY[name]
    optimizer, params = make(), {"a": torch.ones(3), "b": torch.ones(2)}
    grads = {key: torch.ones_like(one) for key, one in params.items()}
    state = optimizer.init(params)
    for _ in range(3):
        before = {key: one.clone() for key, one in params.items()}
        for step in (optimizer.update_, optimizer.update):
            with pytest.raises(error):
                step(params, grads, state, measured=measured)
        assert all(torch.equal(before[key], one) for key, one in params.items())
        optimizer.update_(params, grads, state)


def test_a_total_without_a_plan_is_added_up_in_the_order_of_the_leaves() -> None:
    """A large gradient hides ones that are added after it: only the order tells them apart."""
    params = [torch.zeros(1, dtype=torch.float64) for _ in range(2001)]
    grads = [torch.ones(1, dtype=torch.float64) for _ in params]
    grads[1].fill_(1e8)
    optimizer = sgd(lr=1.0)
    split = partition(
        {"first": optimizer, "second": optimizer},
        lambda path, shape: "second" if path == (1,) else "first",
    )
    found = []
    for rest in (optimizer, split):
        whole = chain(clip_by_global_norm(1.0), rest).using(executor="reference")
        found.append(whole.update(params, grads, whole.init(params))[0])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    hidden = -grads[1] * torch.tensor(1e8 + 1e-6, dtype=torch.float64).reciprocal()
    assert torch.equal(found[1][1], hidden)
