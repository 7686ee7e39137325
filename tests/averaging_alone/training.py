"""A small model trained by ranks that are threads, each on its own data."""

import io
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

WIDTH = 3


def model() -> nn.Sequential:
    """Return a model that is the same on every rank."""
    made = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 2))
    chance = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for param in made.parameters():
            param.copy_(torch.randn(param.shape, generator=chance))
    return made


def batch(rank: int, step: int) -> Tensor:
    """Return a batch that differs by rank and by step."""
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1 + rank + 100 * step))


def backward(module: nn.Module, rank: int, step: int) -> None:
    for param in module.parameters():
        param.grad = None
    module(batch(rank, step)).square().mean().backward()


def train(module: nn.Module, optimizer: Any, rank: int, steps: Sequence[int]) -> list[list[Tensor]]:
    """Step on the rank's own data; return the parameters after each step."""
    seen = []
    for step in steps:
        backward(module, rank, step)
        optimizer.step()
        seen.append(values(module))
    return seen


def values(module: nn.Module) -> list[Tensor]:
    """Return copies of the parameters."""
    return [param.detach().clone() for param in module.parameters()]


def wrapped(module: nn.Module, group: dist.ProcessGroup, hook: Any, state: Any) -> nn.Module:
    """Wrap a module in DDP with a communication hook."""
    ddp = DistributedDataParallel(module, process_group=group, init_sync=False)
    ddp.register_comm_hook(state, hook)
    return ddp


def mean_of(ranks: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the float64 mean of each tensor over the ranks."""
    together = zip(*ranks, strict=True)
    return [torch.stack([one.double() for one in same]).mean(0) for same in together]


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def saved_and_loaded(state: Any) -> Any:
    """Return a state that was saved to a file and loaded by torch.load."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)
