"""Steady steps of TorchOptimizer make no plan, no program, and no memory."""

from collections.abc import Callable

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
from tests.steady import calls_of

from ..support import noise

CHAINS: dict[str, Callable[[], Optimizer]] = {
    "momentum": lambda: sgd(0.1, momentum=0.9),
    "adamw": lambda: adamw(0.1),
    "clipped": lambda: chain(clip_by_global_norm(1.0), adamw(0.1)),
    "groups": lambda: adamw(0.1).override((0,), weight_decay=0.5),
    "accumulated": lambda: chain(accumulate(3), adamw(0.1)),
    "slow weights": lambda: chain(sgd(0.1, momentum=0.9), lookahead(3)),
}
COMPOSED = ("groups", "accumulated", "slow weights")


@pytest.fixture(autouse=True)
def _every_step_is_worth_a_kernel(with_loops: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("functional_optim.kernels.exact.kernel.WORTH_COMPILING", 1)


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
