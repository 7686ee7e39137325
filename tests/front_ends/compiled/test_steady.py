"""Steady steps of TorchOptimizer make no plan, no program, and no memory."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from functional_optim import (
    Optimizer,
    TorchOptimizer,
    accumulate,
    adamw,
    chain,
    clip_by_global_norm,
    lookahead,
    sgd,
)
from tests.choices import case, pairs
from tests.steady import NOTHING, calls_of, made_by

from ..support import SHAPES, noise, params_of

CHAINS: dict[str, Callable[[], Optimizer]] = {
    "momentum": lambda: sgd(0.1, momentum=0.9),
    "adamw": lambda: adamw(0.1),
    "clipped": lambda: chain(clip_by_global_norm(1.0), adamw(0.1)),
    "groups": lambda: adamw(0.1).override((0,), weight_decay=0.5),
    "accumulated": lambda: chain(accumulate(3), adamw(0.1)),
    "slow weights": lambda: chain(sgd(0.1, momentum=0.9), lookahead(3)),
}
COMPOSED = ("groups", "accumulated", "slow weights")
IN_PLACE = ("auto", "compiled")
"""Executors that step leaves where they are stored.

Other executors copy small leaves together into new memory. The squares of a norm are also new
memory, in double precision.
"""
DOUBLE = 8


@pytest.fixture(autouse=True)
def _every_step_is_worth_a_kernel(with_loops: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("functional_optim.kernels.exact.kernel.WORTH_COMPILING", 1)


def _step(optimizer: TorchOptimizer, without: set[int], number: int) -> None:
    params = params_of(optimizer)
    for place in without:
        params[place].grad = None
    for group in optimizer.param_groups:
        group["lr"] = 0.1 / (number + 1)
    optimizer.step()


def _steps(optimizer: TorchOptimizer, numbers: range, *, masked: bool) -> list[Any]:
    """Return steps that set the same gradients; ``masked`` leaves one of them out in turn."""
    grads = [noise(7 + place, *shape) for place, shape in enumerate(SHAPES)]

    def step(number: int) -> None:
        for param, grad in zip(params_of(optimizer), grads, strict=True):
            param.grad = grad
        _step(optimizer, {number % 3} if masked else set(), number)

    return [partial(step, number) for number in numbers]


@pytest.mark.parametrize("name", COMPOSED)
def test_a_steady_step_of_what_is_composed_calls_little_python(name: str) -> None:
    """A steady composed step makes as many Python calls for 40 leaves as for 4."""
    counted = []
    for count in (4, 40):
        params = [torch.nn.Parameter(noise(place, 5)) for place in range(count)]
        for place, param in enumerate(params):
            param.grad = noise(100 + place, 5)
        optimizer = TorchOptimizer(params, CHAINS[name]())
        for _ in range(12):
            optimizer.step()
        counted.append([calls_of(optimizer.step) for _ in range(6)])
    assert counted[1] == counted[0]
    assert max(counted[0]) <= (60 if name == "groups" else 90)


def test_a_steady_step_makes_nothing_and_copies_small_leaves_at_most() -> None:
    """A steady step allocates nothing, except to copy small leaves together.

    The learning rate changes at each step, and gradients are missing in turn.
    """
    every = [*IN_PLACE, "blocked"]
    for one in pairs(name=CHAINS, executor=every, masked=[False, True]):
        params = [torch.nn.Parameter(noise(place, *shape)) for place, shape in enumerate(SHAPES)]
        chosen: Any = CHAINS[one["name"]]().using(executor=one["executor"])
        with case(**one):
            optimizer = TorchOptimizer(params, chosen)
            for step in _steps(optimizer, range(12), masked=one["masked"]):
                step()
            made = made_by(*_steps(optimizer, range(12, 18), masked=one["masked"]))
            if one["executor"] not in IN_PLACE or one["name"] == "clipped":
                assert made.largest <= DOUBLE * sum(map(torch.Tensor.numel, params))
                made = made._replace(largest=NOTHING.largest)
            assert made == NOTHING
