"""Training that loses a rank in the middle of a step, and continues from a checkpoint."""

from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hooks import ZeroHook, zero_step_hook
from sharding import ZeroRedundancyOptimizer
from tests import checkpoints
from tests.ddp import through_memory

from .faults import dies_in_step, raised, shorten

SIZES = ((40, 3), (7,), (5, 5), (), (130,), (64, 2))
SAVED, DIES, END = 3, 4, 7
"""Iterations before the checkpoint, the iteration of the death, and all iterations."""
OPTIONS = {"lr": 0.05, "weight_decay": 0.1, "foreach": False}


class Weighted(nn.Module):
    """Weighted sum of all parameters, so that the weights are the gradients."""

    def __init__(self) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(3)
        self.parts = nn.ParameterList(torch.randn(size, generator=made) for size in SIZES)

    def forward(self, weights: list[Tensor]) -> Tensor:
        terms = [(a * b).sum() for a, b in zip(self.parts, weights, strict=True)]
        return torch.stack(terms).sum()


def weights(iteration: int, apart: int = 0) -> list[Tensor]:
    """Return the weights of an iteration, shifted by ``apart`` times a drawn offset.

    The weights are multiples of 1/8, so sums and means over 2 and 4 ranks are exact. The mean does
    not depend on the number of ranks.
    """
    drawn = torch.Generator().manual_seed(iteration)
    mean = [torch.randint(-40, 40, size, generator=drawn) / 8 for size in SIZES]
    off = [torch.randint(1, 9, size, generator=drawn) / 8 for size in SIZES]
    return [a + apart * b for a, b in zip(mean, off, strict=True)]


def alone() -> list[Tensor]:
    """Return the parameters that one process trains, from the first iteration to the last."""
    module = Weighted()
    optimizer = torch.optim.AdamW(module.parameters(), **OPTIONS)
    for iteration in range(END):
        optimizer.zero_grad()
        module(weights(iteration)).backward()
        optimizer.step()
    return [param.detach() for param in module.parts]


class Training:
    """Rank of the training."""

    def __init__(self, policy: str, group: dist.ProcessGroup | None = None) -> None:
        self.ddp = DistributedDataParallel(Weighted(), process_group=group, bucket_cap_mb=3e-4)
        self.group = self.ddp.process_group
        self.zero = ZeroRedundancyOptimizer(
            self.ddp.module.named_parameters(),
            torch.optim.AdamW,
            group,
            overlap_with_ddp=True,
            policy=policy,
            **OPTIONS,
        )
        self.hook: ZeroHook = zero_step_hook(self.ddp, self.zero)
        self.ddp.register_comm_hook(None, self.hook)

    def iterate(self, iteration: int) -> None:
        """Run an iteration with the data of this rank."""
        apart = 2 * self.group.rank() - (self.group.size() - 1)
        self.ddp(weights(iteration, apart)).backward()
        self.ddp.zero_grad()


def dies(folder: str, victim: int, memory: bool) -> list[str]:
    """Train, save once, and lose a rank later; return the error."""
    with through_memory.through_memory() if memory else nullcontext():
        training = Training("elements")
        for iteration in range(SAVED):
            training.iterate(iteration)
        checkpoints.save(training.zero, folder)
        if dist.get_rank() == 0:
            torch.save(training.ddp.module.state_dict(), Path(folder, "model.pt"))
        for iteration in range(SAVED, DIES):
            training.iterate(iteration)
        dist.barrier()
        shorten(training.group, 5.0)
        if dist.get_rank() == victim:
            dies_in_step(training.zero)
        return raised(lambda: training.iterate(DIES))


def goes_on(group: dist.ProcessGroup, folder: Path, policy: str) -> None:
    """Continue from the checkpoint, and check that parameters match one process bit for bit."""
    training = Training(policy, group)
    saved = torch.load(folder / "model.pt", weights_only=True)
    training.ddp.module.load_state_dict(saved)
    checkpoints.load(training.zero, folder)
    for iteration in range(SAVED, END):
        training.iterate(iteration)
    params = list(training.ddp.module.parts)
    assert all(not torch.equal(a, b) for a, b in zip(params, saved.values(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(params, alone(), strict=True))
