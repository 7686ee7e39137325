"""Runs under communication hooks that stop and resume, on real processes."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn.parallel import DistributedDataParallel

from hooks import (
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    PostLocalSGDState,
    post_localSGD_hook,
)
from hooks.averaging.contrib import PowerSGDMemory, power_sgd_hook
from tests.averaging_alone.training import same, saved_and_loaded
from tests.choices import case

STEPS = 8
SMALL = 0.0001
"""Bucket size in MiB, so small that each layer has its own bucket."""
WARMUP = 3


def layers() -> nn.Sequential:
    """Return a model that is equal on all ranks; two of its matrices have the same shape."""
    made = nn.Sequential(
        nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 40), nn.Linear(40, 5)
    )
    chance = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for param in made.parameters():
            param.copy_(torch.randn(param.shape, generator=chance) / 3)
    return made


class Run:
    """Model of a rank under DDP, with periodic means over the ranks."""

    optimizer: PostLocalSGDOptimizer

    def __init__(self, group: Any, cap: float) -> None:
        self.module, self.rank = layers(), group.rank()
        self.ddp = DistributedDataParallel(
            self.module, process_group=group, init_sync=False, bucket_cap_mb=cap
        )

    def average(self, group: Any) -> None:
        """Make the optimizer, which averages over the ranks."""
        inner = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=0.9)
        averager = PeriodicModelAverager(3, WARMUP, group)
        self.optimizer = PostLocalSGDOptimizer(inner, averager)

    def steps(self, which: range) -> None:
        for step in which:
            self.optimizer.zero_grad()
            chance = torch.Generator().manual_seed(1 + self.rank + 100 * step)
            self.ddp(torch.randn(5, 6, generator=chance)).square().mean().backward()
            self.optimizer.step()

    def saved(self) -> Any:
        """Return the states of model and optimizer, saved to a file and loaded by torch.load."""
        return saved_and_loaded((self.module.state_dict(), self.optimizer.state_dict()))

    def load(self, saved: Any) -> None:
        self.module.load_state_dict(saved[0])
        self.optimizer.load_state_dict(saved[1])

    def all(self) -> list[Tensor]:
        """Return all tensors that must be equal: here parameters and momentum."""
        state = [one["momentum_buffer"] for one in self.optimizer.state.values()]
        return [one.detach().clone() for one in (*self.module.parameters(), *state)]

    def buckets(self) -> list[Any]:
        """Return the hook's buckets of the last backward pass."""
        found: list[Any] = self.optimizer.state_dict()["averaging"]["hook_buckets"]
        return found


class PostLocalRun(Run):
    """Run with the hook of post-local SGD."""

    def __init__(self, group: Any, *, cap: float = SMALL) -> None:
        super().__init__(group, cap)
        self.hook = PostLocalSGDState(group, group, WARMUP)
        self.ddp.register_comm_hook(self.hook, post_localSGD_hook)
        self.average(group)


class PowerSGDRun(Run):
    """Run with the hook of PowerSGD."""

    def __init__(
        self, group: Any, *, cap: float = SMALL, post_local: bool = False, **options: Any
    ) -> None:
        super().__init__(group, cap)
        chosen = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2, **options}
        chosen["min_compression_rate"] = 1
        post = PostLocalSGDState(group, group, WARMUP)
        self.memory = PowerSGDMemory(
            PowerSGDState(group, **chosen),
            self.ddp,
            at_first=partial(post_localSGD_hook, post) if post_local else None,
        )
        self.ddp.register_comm_hook(self.memory, power_sgd_hook)
        self.average(group)

    def all(self) -> list[Tensor]:
        """Return also the errors, the matrices Q, and the state of the random numbers."""
        memory = self.memory.state_dict()
        assert memory["iteration"] == self.memory.state.iter == self.optimizer.averager.step
        kept = [memory[key][name] for key in ("errors", "qs") for name in memory[key] or ()]
        return [*super().all(), *(one.detach().clone() for one in (*kept, memory["rng"][0]))]

    def buckets(self) -> list[Any]:
        found: list[Any] = self.memory.state_dict()["buckets"]
        return found


POWER_SGD: list[tuple[int, dict[str, Any]]] = [
    (5, {}),
    (2, {"post_local": True, "start_powerSGD_iter": WARMUP}),
    (3, {"post_local": True, "start_powerSGD_iter": WARMUP}),
    (3, {"start_powerSGD_iter": 4}),
    (4, {"start_powerSGD_iter": 4}),
    (5, {"warm_start": False}),
    (5, {"use_error_feedback": False}),
    (5, {"batch_tensors_with_same_shape": True}),
    (5, {"cap": 25.0}),
]
"""Number of steps before the stop, and options, for each run."""
POST_LOCAL: list[tuple[int, dict[str, Any]]] = [(2, {}), (3, {}), (5, {}), (5, {"cap": 25.0})]
"""Number of steps before the stop, and options: in the warm-up, at its end, after it."""
KINDS: dict[str, tuple[type[Run], list[tuple[int, dict[str, Any]]]]] = {
    "PowerSGD": (PowerSGDRun, POWER_SGD),
    "post-local SGD": (PostLocalRun, POST_LOCAL),
}


def stopped_is_never_stopped(kind: str) -> int:
    """Assert that a stopped run equals one that never stops; return the number of cases."""
    made, cases = KINDS[kind]
    group = dist.group.WORLD
    for cut, options in cases:
        whole, first, second = (made(group, **options) for _ in range(3))
        whole.steps(range(STEPS))
        first.steps(range(cut))
        second.load(first.saved())
        second.steps(range(cut, cut + 1))
        with case(cut=cut, **options):
            assert second.buckets() == first.buckets()
            second.steps(range(cut + 1, STEPS))
            assert same(whole.all(), second.all())
            assert second.buckets() == whole.buckets()
            assert (len(second.buckets()) == 1) == ("cap" in options)
    return len(cases)
