"""Runs of one parameter for tests of transforms and wrappers."""

from typing import Any

import torch
from torch import Tensor

import functional_optim as fo
from tests.agreement.formulas_transforms import logits_at

STEPS = 20
SHAPE = (4, 6)


def problem(shape: tuple[int, ...] = SHAPE, seed: int = 3) -> tuple[Tensor, list[Tensor]]:
    """Return a parameter and the gradients of all steps. All values are float32."""
    generator = torch.Generator().manual_seed(seed)
    param, *grads = (torch.randn(shape, generator=generator) for _ in range(STEPS + 1))
    return param, grads


def run(
    optimizer: fo.Optimizer, param: Tensor, grads: list[Tensor], **extra: Any
) -> tuple[Tensor, Any]:
    state = optimizer.init(param)
    for step, grad in enumerate(grads, start=1):
        given = {name: make(step, param) for name, make in extra.items()}
        param, state = optimizer.update(param, grad, state, extra=given or None)
    return param, state


def largest_logits(step: int, param: Tensor) -> Tensor:
    logits = torch.tensor(logits_at(step, len(param)), dtype=param.dtype)
    return logits[:, None].expand_as(param)
