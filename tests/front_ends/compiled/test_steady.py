"""Once all is found out, a TorchOptimizer makes no plan, no program, and no memory."""

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
    sgd,
)
from functional_optim.kernels import auto
from tests.choices import case, pairs
from tests.steady import NOTHING, made_by

from ..support import SHAPES, noise, params_of

CHAINS: dict[str, Callable[[], Optimizer]] = {
    "momentum": lambda: sgd(0.1, momentum=0.9),
    "adamw": lambda: adamw(0.1),
    "clipped": lambda: chain(clip_by_global_norm(1.0), adamw(0.1)),
    "groups": lambda: adamw(0.1).override((0,), weight_decay=0.5),
    "accumulated": lambda: chain(accumulate(3), adamw(0.1)),
}
IN_PLACE = ("auto", "compile", "reference")
"""They step leaves where they lie; others bring small ones together, into new memory.

The squares of a norm are new memory, too, and in double precision.
"""
DOUBLE = 8


@pytest.fixture(autouse=True)
def _every_step_is_worth_a_kernel(with_loops: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "WORTH_COMPILING", 1)


def _step(optimizer: TorchOptimizer, without: set[int], number: int) -> None:
    params = params_of(optimizer)
    for place in without:
        params[place].grad = None
    for group in optimizer.param_groups:
        group["lr"] = 0.1 / (number + 1)
    optimizer.step()


def _steps(optimizer: TorchOptimizer, numbers: range, *, masked: bool) -> list[Any]:
    """With gradients that are there already: of some of the parameters, in turn."""
    grads = [noise(7 + place, *shape) for place, shape in enumerate(SHAPES)]

    def step(number: int) -> None:
        for param, grad in zip(params_of(optimizer), grads, strict=True):
            param.grad = grad
        _step(optimizer, {number % 3} if masked else set(), number)

    return [partial(step, number) for number in numbers]


def test_a_steady_step_makes_nothing_and_copies_small_leaves_at_most() -> None:
    """Whatever the rate, and with gradients of some and of others in turn."""
    every = [*IN_PLACE, "blocked", "script", "fused"]
    for one in pairs(name=CHAINS, executor=every, masked=[False, True], flat=[False, True]):
        composed = one["name"] in ("groups", "accumulated")
        if one["executor"] == "fused" and one["name"] in ("clipped", "accumulated"):
            continue  # torch has no such kernel
        if one["flat"] and composed:
            continue  # such an optimizer takes no buffers
        params = [torch.nn.Parameter(noise(place, *shape)) for place, shape in enumerate(SHAPES)]
        chosen: Any = CHAINS[one["name"]]().using(executor=one["executor"])
        with case(**one):
            optimizer = TorchOptimizer(params, chosen, flat=one["flat"])
            for step in _steps(optimizer, range(12), masked=one["masked"]):
                step()
            made = made_by(*_steps(optimizer, range(12, 18), masked=one["masked"]))
            together = not one["flat"] and one["executor"] not in IN_PLACE
            if together or one["name"] == "clipped":
                assert made.largest <= DOUBLE * sum(map(torch.Tensor.numel, params))
                made = made._replace(largest=NOTHING.largest)
            assert made == NOTHING
