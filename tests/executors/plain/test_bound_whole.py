"""The commonest step, of which almost nothing is found out anew, is the step that it stands for."""

from collections.abc import Callable
from typing import Any

import pytest

from functional_optim import Optimizer, bound
from functional_optim.bound import BoundOptimizer
from functional_optim.executors.kernel import KernelError

from ...choices import case, pairs
from ..bound_tree import parameters, some
from ..support import assert_same, copied
from .test_bound import MEASURED, OPTIMIZERS

EVERY = OPTIMIZERS | MEASURED
WITHOUT = frozenset({"b", "g"})


def tree(seed: int) -> dict[str, Any]:
    """All of it lies in buffers."""
    return {
        name: value for name, value in parameters(seed, module=True).items() if name not in "hj"
    }


def fill(one: BoundOptimizer, seed: int) -> None:
    for name, value in tree(seed).items():
        one.gradients[name].copy_(value.detach())


def ahead(one: BoundOptimizer) -> None:
    """Someone writes to the number of steps of one parameter."""
    one.state.leaves["c"].step.add_(3)


def all_ahead(one: BoundOptimizer) -> None:
    for leaf in one.state.leaves.values():
        leaf.step.fill_(20)


BETWEEN: dict[str, Callable[[BoundOptimizer], None]] = {
    "nothing": lambda one: None,
    "another lr": lambda one: one.set_hyper(lr=0.02),
    "a schedule": lambda one: one.set_hyper(lr=lambda made: 0.1 / (2 + made)),
    "a number again": lambda one: one.set_hyper(lr=0.03),
    "some gradients": lambda one: one.step(
        {name: grad for name, grad in some(9, WITHOUT).items() if name not in "hj"}
    ),
    "an lr for once": lambda one: one.step(one.gradients, lr=0.5),
    "one is ahead": ahead,
    "all are ahead": all_ahead,
    "another state": lambda one: one.load_state(copied(one.state)),
}


def trained(optimizer: Optimizer) -> Any:
    """Parameters and state after some steps; the text of the error of an executor that refuses."""
    one = optimizer.bind(tree(0))
    try:
        for number, between in enumerate(BETWEEN.values()):
            for again in range(2):
                fill(one, 2 * number + again)
                one.step(one.gradients)
            between(one)
        fill(one, 40)
        one.step(one.gradients)
    except KernelError as error:
        return str(error)
    return one.params, one.state


def test_it_is_the_step_that_is_made_otherwise(
    executors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for one in pairs(name=EVERY, executor=(*executors, "fused")):
        optimizer = EVERY[one["name"]].using(executor=one["executor"])
        found = trained(optimizer)
        with monkeypatch.context() as patch:
            patch.setattr(BoundOptimizer, "_whole_step", lambda self: None)
            want = trained(optimizer)
        with case(**one):
            if isinstance(want, str):
                assert found == want
            else:
                assert_same(found, want)


def test_nothing_else_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    works = bound.works

    def counted(*arguments: Any, **options: Any) -> Any:
        asked.append(arguments)
        return works(*arguments, **options)

    monkeypatch.setattr(bound, "works", counted)
    for executor in ("blocked", "fused"):
        one = EVERY["adamw"].using(executor=executor).bind(tree(0))
        asked.clear()
        for seed in range(3):
            fill(one, seed)
            one.step(one.gradients)
        assert asked == []
        ahead(one)
        one.step(one.gradients)  # in several lanes
        assert len(asked) == 1
        assert [int(leaf.step) for leaf in one.state.leaves.values()] == [4, 4, 7, 4, 4, 4, 4, 4]
