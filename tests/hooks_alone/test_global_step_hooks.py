"""torch's global step hooks, which see each step once."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from functional_optim import DistributedOptimizer, TorchOptimizer, adamw
from hooks import PeriodicModelAverager, PostLocalSGDOptimizer
from sharding import ZeroRedundancyOptimizer
from tests.choices import case

pytestmark = pytest.mark.usefixtures("world_of_one")


class Alone(torch.optim.SGD):
    """Optimizer class without functional equivalent."""


@pytest.fixture
def seen() -> Iterator[list[str]]:
    """Yield the recorded calls of global step hooks."""
    found: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: found.append("before")),
        register_optimizer_step_post_hook(lambda *_: found.append("after")),
    ]
    yield found
    for one in handles:
        one.remove()


def averaged(inner: torch.optim.Optimizer) -> PostLocalSGDOptimizer:
    return PostLocalSGDOptimizer(inner, PeriodicModelAverager(1000, 1000))


NESTED: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "ZeRO": lambda params: ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=0.1),
    "ZeRO of a class of one's own": lambda params: ZeroRedundancyOptimizer(params, Alone, lr=0.1),
    "averaged": lambda params: averaged(torch.optim.SGD(params, lr=0.1)),
    "averaged, ours": lambda params: averaged(TorchOptimizer(params, adamw())),
    "averaged ZeRO": lambda params: averaged(
        ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1)
    ),
}


def test_once_in_each_step(seen: list[str]) -> None:
    """Global hooks see one step, also if an optimizer holds another one (fault 32)."""
    for name, make in NESTED.items():
        params: Any = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
        optimizer = make(params)
        for _ in range(3):
            for one in params:
                one.grad = torch.ones_like(one)
            seen.clear()
            optimizer.step()
            with case(name=name):
                assert seen == ["before", "after"]
        assert not torch.equal(params[0], torch.ones(2))


def test_once_over_workers(seen: list[str]) -> None:
    """Global hooks see one step, although each worker steps a class as it is (fault 32)."""
    module = nn.Linear(2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the class has no functional equivalent
        optimizer = DistributedOptimizer.over_threads(
            Alone, module, {"weight": "a", "bias": "b"}, lr=0.1
        )
    optimizer.step([torch.ones_like(one) for one in module.parameters()])
    optimizer.close()
    assert seen == ["before", "after"]


def test_hooks_of_either_optimizer_are_called(seen: list[str]) -> None:
    """Hooks of both optimizers run in torch's order, also if a scheduler patches the inner step."""
    param = nn.Parameter(torch.ones(2))
    inner = torch.optim.SGD([param], lr=0.1)
    outer = averaged(inner)
    for name, one in (("inner", inner), ("outer", outer)):
        one.register_step_pre_hook(lambda *_, name=name: seen.append(f"{name} before"))
        one.register_step_post_hook(lambda *_, name=name: seen.append(f"{name} after"))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(inner, 0.5)
    param.grad = torch.ones(2)
    outer.step()
    scheduler.step()
    wanted = ["outer before", "before", "inner before", "inner after", "after", "outer after"]
    assert seen == wanted
    zero = ZeroRedundancyOptimizer([param], torch.optim.SGD, lr=0.1)
    zero.optim.register_step_pre_hook(lambda *_: seen.append("shard before"))
    seen.clear()
    zero.step()
    assert seen == ["before", "shard before", "after"]
