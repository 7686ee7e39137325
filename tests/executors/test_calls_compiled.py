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
    chain,
    clip_by_global_norm,
    ema,
    lamb,
    muon,
    partition,
    prodigy,
    sgd,
    with_shape,
)

from .plain.test_bound_leaves import calls_of

PLAIN, OTHER, PARTS = 60, 120, 180
"""Most calls of a step, torch's own around it included."""

CHAINS: dict[str, tuple[Callable[[], Optimizer], int]] = {
    "sgd": (lambda: sgd(lr=0.1, momentum=0.9), PLAIN),
    "adamw": (lambda: adamw(lr=0.1), PLAIN),
    "clip": (lambda: chain(clip_by_global_norm(1.0), adamw(lr=0.1)), PLAIN),
    "lamb": (lambda: lamb(lr=0.1), OTHER),
    "muon": (lambda: muon(0.1), OTHER),
    "ema": (lambda: chain(adamw(lr=0.1), ema(0.9)), OTHER),
    "accumulate": (lambda: chain(accumulate(2), adamw(lr=0.1)), OTHER),
    "prodigy": (lambda: prodigy(), OTHER),
    "parts": (
        lambda: chain(
            clip_by_global_norm(1.0),
            partition(
                {"muon": muon(0.1), "adamw": adamw(lr=0.1)},
                lambda path, shape: "muon" if len(shape) == 2 else "adamw",
            ),
        ),
        PARTS,
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_warm_step_makes_few_calls(name: str, with_loops: None, monkeypatch: Any) -> None:
    monkeypatch.setattr("functional_optim.kernels.exact.kernel.WORTH_COMPILING", 1)
    make, most = CHAINS[name]
    few, many = calls_of(make, 10), calls_of(make, 60)
    assert few <= most
    assert many - few <= (50 if name in ("muon", "parts") else 0)  # a product each
