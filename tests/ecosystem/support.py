"""Model with two layers, data, and optimizers for the tests of libraries."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from functional_optim import (
    Optimizer,
    TorchOptimizer,
    accumulate,
    adamw,
    chain,
    clip_by_global_norm,
    freeze,
    labels,
    matching,
    muon,
    partition,
    schedule_free_adamw,
    sgd,
)

from ..tensors import normal

SAMPLES = 24

QUIET = pytest.mark.filterwarnings("ignore")
"""Mark of tests that ignore warnings, since the libraries cause many."""


def partitioned() -> Optimizer:
    """Return Muon for a matrix and AdamW for the rest, clipped together, with a frozen bias."""
    parts = {"matrix": muon(lr=0.02), "rest": adamw(lr=0.05), "frozen": freeze()}
    table = {"frozen": matching("first.bias"), "matrix": matching("first.weight")}
    return chain(clip_by_global_norm(1.0), partition(parts, labels(table, default="rest")))


OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {
    "adamw": lambda: adamw(lr=0.05),
    "momentum": lambda: sgd(lr=0.05, momentum=0.9),
    "partition": partitioned,
    "accumulate": lambda: chain(accumulate(2), adamw(lr=0.05)),
    "schedule free": lambda: schedule_free_adamw(lr=0.05),
}

TORCH: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.05, foreach=False),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, foreach=False),
}
"""Optimizers of torch with the same names."""


class Model(nn.Module):
    """Model that returns its loss, like models of Hugging Face."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 1)
        self.calls = 0
        for k, param in enumerate(self.parameters()):
            param.data = normal(*param.shape, seed=k)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        logits = self.second(torch.tanh(self.first(x)))
        return {"loss": (logits - labels).square().mean(), "logits": logits}


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples that are equal in every run."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": normal(3, seed=50 + index), "labels": normal(1, seed=150 + index)}


def batches(size: int = 4) -> torch.utils.data.DataLoader[dict[str, torch.Tensor]]:
    """Return the samples in order."""
    return torch.utils.data.DataLoader(Samples(), batch_size=size)


def optimizer_of(name: str, model: nn.Module) -> TorchOptimizer:
    return TorchOptimizer(model.named_parameters(), OPTIMIZERS[name]())


def schedule_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def plainly(optimizer: torch.optim.Optimizer, model: nn.Module, steps: int) -> None:
    """Train without a library, with :func:`schedule_of`."""
    schedule = schedule_of(optimizer)
    every = list(batches())
    for step in range(steps):
        optimizer.zero_grad()
        model(**every[step % len(every)])["loss"].backward()
        optimizer.step()
        schedule.step()
