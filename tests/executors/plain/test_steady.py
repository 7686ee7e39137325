"""A warm bound step builds no plan and no program, and allocates only scalars."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import Optimizer, adamw, sgd
from functional_optim.kernels import chunks, foreach
from functional_optim.kernels.cache import Cache
from functional_optim.optimizer.bound import BoundOptimizer

from ...choices import case, pairs
from ...steady import NOTHING, made_by
from ..support import noise

SHAPES: tuple[tuple[int, ...], ...] = ((300,), (7,), (40, 50), (), (9,))
CHAINS: dict[str, Optimizer] = {"momentum": sgd(0.1, momentum=0.9), "adamw": adamw(0.1)}


def gradients() -> list[Tensor]:
    return [noise(9 + place, *shape) for place, shape in enumerate(SHAPES)]


def own(bound: BoundOptimizer, grads: list[Tensor], number: int) -> None:
    bound.step(bound.gradients, lr=0.1 / (number + 1))


def given(bound: BoundOptimizer, grads: list[Tensor], number: int) -> None:
    bound.step(grads, lr=0.1 / (number + 1))


def set_once(bound: BoundOptimizer, grads: list[Tensor], number: int) -> None:
    bound.set_hyper(lr=0.1 / (number + 1))
    bound.step(bound.gradients)


def masked(bound: BoundOptimizer, grads: list[Tensor], number: int) -> None:
    """Step with three masks in turn."""
    missing = number % 3
    bound.step(
        [None if k % 3 == missing else g for k, g in enumerate(grads)], lr=0.1 / (number + 1)
    )


WAYS: dict[str, Callable[[BoundOptimizer, list[Tensor], int], None]] = {
    "own": own,
    "given": given,
    "set": set_once,
    "masked": masked,
}


@pytest.mark.parametrize("large", [1, chunks.LARGE])
def test_a_steady_bound_step_makes_nothing(
    large: int, executors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warm bound step with a new learning rate allocates nothing.

    Without a loop, an operation without an in-place form allocates as many elements as the leaf
    has.
    """
    monkeypatch.setattr(chunks, "LARGE", large)
    chosen = [one for one in executors if one != "reference"]  # which allocates every result
    for one in pairs(name=CHAINS, executor=chosen, way=WAYS):
        bound = CHAINS[one["name"]].using(executor=one["executor"])
        made = bound.bind([noise(place, *shape) for place, shape in enumerate(SHAPES)])
        grads, step = gradients(), WAYS[one["way"]]
        for number in range(12):
            step(made, grads, number)
        with case(**one):
            steps = [partial(step, made, grads, number) for number in range(12, 18)]
            found = made_by(*steps)
            if one["executor"] == "blocked":
                assert found.largest <= 4 * max(one.numel for one in made.layout.buffers)
                found = found._replace(largest=NOTHING.largest)
            assert found == NOTHING


def test_what_is_made_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder sees a new plan, a new program, and a new tensor."""
    monkeypatch.setattr(foreach, "_PROGRAMS", Cache())
    made = adamw(0.1).using(executor="blocked").bind([noise(0, 50)])
    found = made_by(lambda: made.step(made.gradients))
    assert found.plans == 1 and found.programs == ["list_program"]
    assert made_by(lambda: torch.ones(100)).largest == 400
