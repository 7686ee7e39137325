"""A small model, its loss, and a comparison with its twin."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def loss(module: nn.Module, iteration: int) -> Tensor:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(iteration))
    value: Tensor = module(x).square().sum()
    return value


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name


def assert_steps_as(
    ours: nn.Module,
    twin: nn.Module,
    plain: torch.optim.Optimizer,
    loss: Callable[[nn.Module, int], Tensor] = loss,
) -> None:
    """Assert that a model stepped in backward equals its twin, which is stepped afterwards."""
    for iteration in range(3):
        before = [param.detach().clone() for param in ours.parameters()]
        plain.zero_grad()
        loss(ours, iteration).backward()
        loss(twin, iteration).backward()
        plain.step()
        assert_same(getattr(ours, "module", ours), twin)
        assert all(param.grad is None for param in ours.parameters())
        assert not any(map(torch.equal, before, ours.parameters()))
