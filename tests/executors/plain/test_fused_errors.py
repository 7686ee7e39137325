"""Optimizers that torch's fused kernels cannot step here."""

import pytest
import torch
from torch import nn

from functional_optim import Optimizer, TorchOptimizer, adamw, chain, clip_by_global_norm, lamb
from functional_optim.kernels.kernel import KernelError


@pytest.mark.parametrize(
    "optimizer", [adamw(), chain(clip_by_global_norm(1.0), adamw()), lamb()], ids=str
)
def test_explain_says_that_a_step_raises_an_error(optimizer: Optimizer) -> None:
    param = nn.Parameter(torch.ones(3, 2))
    torch_optimizer = TorchOptimizer([param], optimizer.using(executor="fused"))
    assert "no kernel, so a step raises an error: " in torch_optimizer.explain()
    param.grad = torch.ones(3, 2)
    with pytest.raises(KernelError):
        torch_optimizer.step()
