"""Sparse gradients, and the optimizers that take them, beside those of torch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from functional_optim import Optimizer, adagrad, sgd

from .support import noise

ROWS, WIDTH = 10, 3
SPARSE: dict[str, tuple[Any, Callable[..., Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, sgd, {"lr": 0.1}),
    "sgd ascending": (torch.optim.SGD, sgd, {"lr": 0.1, "maximize": True}),
    "momentum": (torch.optim.SGD, sgd, {"lr": 0.1, "momentum": 0.9}),
    "dampening": (torch.optim.SGD, sgd, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "nesterov": (torch.optim.SGD, sgd, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adagrad": (torch.optim.Adagrad, adagrad, {"lr": 0.1, "lr_decay": 0.2}),
    "adagrad ascending": (
        torch.optim.Adagrad,
        adagrad,
        {"lr": 0.1, "initial_accumulator_value": 0.3, "maximize": True},
    ),
}
"""torch's class, our constructor, and the hyper-parameters of both."""


def sparse(seed: int, dtype: torch.dtype = torch.float64, stored: int = 7) -> Tensor:
    """Return a gradient that stores some rows of the first half, several of them twice."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(0, ROWS // 2, (1, stored), generator=generator)
    index[0, 0] = index[0, 1] = 2
    grad = torch.sparse_coo_tensor(
        index, noise(seed, stored, WIDTH, dtype=dtype), (ROWS, WIDTH), check_invariants=True
    )
    assert not grad.is_coalesced()
    return grad


def dense(value: Tensor) -> Tensor:
    return value.to_dense() if value.is_sparse else value


def sparse_rows(step: int) -> dict[str, Tensor]:
    """Return the parameters for step 0, and sparse gradients for later steps."""
    return {"a": sparse(step) if step else noise(0, ROWS, WIDTH)}
