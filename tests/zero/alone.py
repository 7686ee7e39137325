"""Small parameters, and steps with gradients of one value, for an optimizer on one rank."""

from typing import Any

import torch
from torch import nn


def params(*sizes: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.arange(float(size))) for size in sizes or (3, 2)]


def step(zero: torch.optim.Optimizer, value: float = 1.0) -> Any:
    for group in zero.param_groups:
        for param in group["params"]:
            param.grad = torch.full_like(param, value)
    return zero.step()
