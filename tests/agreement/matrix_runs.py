"""Random matrices by a seed, and runs of an optimizer on them."""

from typing import Any

import torch
from torch import Tensor

from functional_optim import Optimizer, PolarFactor

POLARS = {
    "quintic": PolarFactor.quintic(),
    "tuned_quintic": PolarFactor.tuned_quintic(),
    "polar_express": PolarFactor.polar_express(),
    "cans": PolarFactor.cans(),
    "deepseek": PolarFactor.deepseek(),
}


def drawn(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def run(optimizer: Optimizer, param: Tensor, grads: list[Tensor]) -> tuple[Tensor, Any]:
    """Return the parameter and the state of the rule after one step for each gradient."""
    state = optimizer.init(param)
    for grad in grads:
        param, state = optimizer.update(param, grad, state)
    return param, next(one for one in reversed(state.leaves.stages) if one)
