"""A warm step makes a number of Python calls that does not depend on the number of leaves."""

from collections.abc import Callable
from typing import Any

import pytest
from torch.nn import Parameter

from functional_optim import (
    Optimizer,
    TorchOptimizer,
    accumulate,
    adamw,
    apply_if_finite,
    chain,
    clip_by_global_norm,
    ema,
    lamb,
    muon,
    partition,
    prodigy,
    sgd,
)

from ..steady import every_call_of
from .support import noise

CHAINS: dict[str, tuple[Callable[[], Optimizer], int]] = {
    "sgd": (lambda: sgd(lr=0.1, momentum=0.9), 60),
    "adamw": (lambda: adamw(lr=0.1), 60),
    "clip": (lambda: chain(clip_by_global_norm(1.0), adamw(lr=0.1)), 60),
    "lamb": (lambda: lamb(lr=0.1), 90),
    "muon": (lambda: muon(0.1), 90),
    "ema": (lambda: chain(adamw(lr=0.1), ema(0.9)), 60),
    "accumulate": (lambda: chain(accumulate(2), adamw(lr=0.1)), 100),
    "prodigy": (prodigy, 120),
    "finite": (lambda: chain(apply_if_finite(3), adamw(lr=0.1)), 120),
    "parts": (
        lambda: chain(
            clip_by_global_norm(1.0),
            partition(
                {"muon": muon(0.1), "adamw": adamw(lr=0.1)},
                lambda path, shape: "muon" if len(shape) == 2 else "adamw",
            ),
        ),
        120,
    ),
}
"""Each chain, and the most calls of its step. Torch itself makes about 20 of these calls."""

A_LEAF = {"muon": 50, "parts": 50}
"""Extra calls for 50 more leaves: these chains call one function for each leaf."""


def calls_of(make: Callable[[], Optimizer], count: int) -> int:
    """Return the number of Python calls in a warm step of ``count`` matrices."""
    params = [Parameter(noise(k, 10, 10)) for k in range(count)]
    for k, param in enumerate(params):
        param.grad = noise(1000 + k, 10, 10)
    optimizer = TorchOptimizer(params, make())
    for _ in range(6):
        optimizer.step()
    return every_call_of(optimizer.step)


@pytest.mark.parametrize("name", CHAINS)
def test_a_warm_step_makes_few_calls(name: str, with_loops: None, monkeypatch: Any) -> None:
    monkeypatch.setattr("functional_optim.kernels.exact.kernel.WORTH_COMPILING", 1)
    make, most = CHAINS[name]
    few, many = calls_of(make, 10), calls_of(make, 60)
    assert few <= most
    assert many - few <= A_LEAF.get(name, 0)


def test_construction_and_first_step_make_few_calls_for_a_parameter(with_loops: None) -> None:
    """Construction and first step read each parameter with a bounded number of calls."""

    def calls(count: int) -> tuple[int, int]:
        params = [Parameter(noise(k, 10, 10)) for k in range(count)]
        for k, param in enumerate(params):
            param.grad = noise(1000 + k, 10, 10)
        made: list[TorchOptimizer] = []
        built = every_call_of(lambda: made.append(TorchOptimizer(params, adamw(lr=0.1))))
        return built, every_call_of(made[0].step)

    calls(20)
    few, many = calls(20), calls(60)
    assert many[0] - few[0] <= 40 * 66
    assert many[1] - few[1] <= 40 * 80
