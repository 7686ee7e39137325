"""torch's functional classes as torch's DistributedOptimizer steps them: in TorchScript.

They are marked for TorchScript, but an instance that Python calls runs in Python; it is scripted
as part of a module only.
"""

import warnings
from typing import Any

import torch
from torch import Tensor, nn


class _Holder(nn.Module):
    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self.optimizer = optimizer

    def forward(self, gradients: list[Tensor | None]) -> None:
        self.optimizer.step(gradients)


def scripted(optimizer: Any) -> Any:
    """A module that steps a functional optimizer by these gradients, compiled by TorchScript."""
    with warnings.catch_warnings(record=True):  # as in benchmarks.cases
        warnings.simplefilter("ignore")
        return torch.jit.script(_Holder(optimizer))
