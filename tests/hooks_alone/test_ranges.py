"""Ranges that torch.profiler shows for each front-end, by name."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from functional_optim import DistributedOptimizer, adamw, sgd
from hooks import PeriodicModelAverager, step_hook, zero_step_hook
from hooks.averaging import OuterModelAverager
from hooks.averaging.contrib import GossipModelAverager
from sharding import ZeroRedundancyOptimizer
from tests.choices import case


def backward(ddp: nn.Module) -> None:
    ddp(torch.ones(2, 3)).sum().backward()


def by_step_hook() -> Callable[[], Any]:
    ddp = DistributedDataParallel(nn.Linear(3, 1))
    step_hook(ddp, adamw(lr=0.1))
    return lambda: backward(ddp)


def by_zero_step_hook() -> Callable[[], Any]:
    ddp = DistributedDataParallel(nn.Linear(3, 1))
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    ddp.register_comm_hook(None, zero_step_hook(ddp, zero))
    return lambda: backward(ddp)


def by_zero() -> Callable[[], Any]:
    module = nn.Linear(3, 1)
    zero = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)
    backward(module)
    return zero.step


def averaged() -> Callable[[], Any]:
    averager = PeriodicModelAverager(2)
    return lambda: averager.average_parameters([nn.Parameter(torch.ones(2))])


def averaged_outside() -> Callable[[], Any]:
    averager = OuterModelAverager([nn.Parameter(torch.ones(2))], sgd(lr=1.0), 1)
    return averager.average_parameters


def averaged_in_pairs() -> Callable[[], Any]:
    averager = GossipModelAverager([nn.Parameter(torch.ones(2))], 1)
    return averager.average_parameters


def distributed() -> Callable[[], Any]:
    param = torch.ones(2, requires_grad=True)
    optimizer = DistributedOptimizer.over_threads(adamw, {"w": param}, {"w": "ps"}, lr=0.1)
    return lambda: optimizer.step([torch.ones(2)])


SHOWN = (
    ("functional_optim.step_hook", by_step_hook),
    ("functional_optim.zero_step", by_zero_step_hook),
    ("functional_optim.average_parameters", averaged),
    ("functional_optim.average_parameters", averaged_outside),
    ("functional_optim.average_parameters", averaged_in_pairs),
    ("Optimizer.step#ZeroRedundancyOptimizer.step", by_zero),
    ("Optimizer.step#DistributedOptimizer.step", distributed),
)


def test_the_profiler_shows_steps_by_name(world_of_one: None) -> None:
    """The thread that reduced a bucket steps it, so the profiler must watch all threads."""
    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    for name, front_end in SHOWN:
        step = front_end()
        with torch.profiler.profile(experimental_config=everywhere) as seen:
            step()
        with case(name=name, front_end=front_end.__name__):
            assert name in {event.key for event in seen.key_averages()}
