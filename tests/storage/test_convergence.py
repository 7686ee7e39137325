"""Each storage learns as float32 does: a small network, 300 steps, the same batches."""

import pytest
import torch
from torch import Tensor

from functional_optim import Optimizer, adamw
from functional_optim.storage import stored

from .support import normal

STEPS = 300


def loss_of(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    hidden = torch.relu(x @ params["a"])
    return torch.nn.functional.cross_entropy(torch.relu(hidden @ params["b"]) @ params["c"], y)


def final_loss(optimizer: Optimizer, dtype: torch.dtype) -> float:
    x = normal(256, 24, seed=1)
    y = (torch.relu(x @ normal(24, 32, seed=2)) @ normal(32, 6, seed=3)).argmax(1)
    shapes = {"a": (24, 64), "b": (64, 64), "c": (64, 6)}
    params = {
        name: (normal(*shape, seed=i) / shape[0] ** 0.5).to(dtype)
        for i, (name, shape) in enumerate(shapes.items(), start=4)
    }
    state = optimizer.init(params)
    for step in range(STEPS):
        rows = torch.arange(64) + 64 * (step % 4)
        wide = {name: param.float().clone().requires_grad_() for name, param in params.items()}
        found = torch.autograd.grad(loss_of(wide, x[rows], y[rows]), list(wide.values()))
        grads = {name: grad.to(dtype) for name, grad in zip(wide, found, strict=True)}
        optimizer.update_(params, grads, state)
    return float(loss_of({name: param.float() for name, param in params.items()}, x, y))


BASE = adamw(lr=5e-4)


@pytest.fixture(scope="module")
def plain() -> float:
    return final_loss(BASE, torch.float32)


@pytest.mark.parametrize(
    "arguments",
    [
        {"param": "bfloat16+master"},
        {"param": "bfloat16+kahan"},
        {"param": "bfloat16+stochastic"},
        {"state": "bfloat16+stochastic"},
        {"state": "int8+stochastic"},
        {"param": "bfloat16+kahan", "state": "int8+stochastic"},
        {"param": "bfloat16+stochastic", "state": "int8+stochastic"},
    ],
    ids=str,
)
def test_it_learns_as_float32_does(arguments: dict[str, str], plain: float) -> None:
    dtype = torch.bfloat16 if "param" in arguments else torch.float32
    assert final_loss(stored(BASE, **arguments), dtype) == pytest.approx(plain, rel=0.1)


def test_rounding_to_nearest_does_not(plain: float) -> None:
    """So the test above is able to fail."""
    assert plain < 0.6
    assert final_loss(stored(BASE, param="bfloat16"), torch.bfloat16) > 1.25 * plain
