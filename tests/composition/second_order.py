"""Sophia and AdaHessian in plain Python numbers, from their papers, and runs to compare with."""

from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from functional_optim import Optimizer, State, adahessian, sophia

from ..tensors import normal
from .trees import SHAPES, Tree, grads_at, params_of

Columns = Sequence[tuple[float, float | None]]
"""Gradient and estimate (or None) of one element, for each step."""

EVERY = 3
"""Period of Sophia's estimates: every third step has one, from the first step on."""


def estimates_at(step: int, dtype: torch.dtype = torch.float32) -> Tree:
    """Return estimates for a step, counted from 0. Some estimates are negative."""
    return {
        name: normal(*shape, seed=7000 + 100 * step + k, dtype=dtype)
        for k, (name, shape) in enumerate(SHAPES.items())
    }


def given_at(step: int, every: int = 1) -> dict[str, Tree]:
    """Return the extra inputs of a step, or none if the step has no estimates."""
    return {} if step % every else {"hessian": estimates_at(step)}


def sophia_formula(p: float, columns: Columns, c: dict[str, Any]) -> tuple[float, ...]:
    """Return the parameter, m and h, by algorithm 3 of Liu et al."""
    (b1, b2), m, h = c["betas"], 0.0, 0.0
    for gradient, estimate in columns:
        m = b1 * m + (1 - b1) * gradient
        if estimate is not None:
            h = b2 * h + (1 - b2) * estimate
        p = p - c["lr"] * c["weight_decay"] * p
        p = p - c["lr"] * max(-1.0, min(1.0, m / max(c["gamma"] * h, c["eps"])))
    return p, m, h


def adahessian_formula(p: float, columns: Columns, c: dict[str, Any]) -> tuple[float, ...]:
    """Return the parameter, m and v, by algorithm 1 of Yao et al. without spatial averaging."""
    (b1, b2), m, v = c["betas"], 0.0, 0.0
    for t, (gradient, estimate) in enumerate(columns, 1):
        assert estimate is not None
        m = b1 * m + (1 - b1) * (-gradient if c["maximize"] else gradient)
        v = b2 * v + (1 - b2) * estimate * estimate
        root = (v / (1 - b2**t)) ** 0.5
        p = p - c["lr"] * c["weight_decay"] * p
        p = p - c["lr"] * (m / (1 - b1**t)) / (root ** c["hessian_power"] + c["eps"])
    return p, m, v


BOTH: dict[str, tuple[Callable[[], Optimizer], int]] = {
    "sophia": (lambda: sophia(0.1, gamma=0.5), EVERY),
    "adahessian": (lambda: adahessian(0.1), 1),
}
"""Optimizers, each with the number of steps from one estimate to the next."""


def run_given(
    optimizer: Optimizer,
    steps: int = 7,
    *,
    every: int = 1,
    missing: dict[int, str] | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tree, State]:
    """Return parameters and state after several pure updates."""
    params: Any = cast(params_of(), dtype)
    state = optimizer.init(params)
    for step in range(steps):
        grads = cast(grads_at(step, missing=missing), dtype)
        params, state = optimizer.update(
            params, grads, state, extra=cast(given_at(step, every), dtype)
        )
    return params, state


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """Return a tree in another dtype. None stays None."""

    def one(tensor: Tensor) -> Tensor:
        return tensor.to(dtype)

    return optree.tree_map(one, tree)
