"""Functional classes of torch in TorchScript, as torch's DistributedOptimizer steps them.

The classes are marked for TorchScript, but an instance that Python calls runs in Python.
TorchScript compiles an instance only as part of a module.
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
    """Return a module, compiled by TorchScript, that steps a functional optimizer by gradients."""
    with warnings.catch_warnings(record=True):  # as in benchmarks.cases
        warnings.simplefilter("ignore")
        return torch.jit.script(_Holder(optimizer))
