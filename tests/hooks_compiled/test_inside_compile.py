"""Backward passes in compiled code, whose hooks run as they do outside."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from functional_optim import adamw
from hooks import apply_optimizer_in_backward, step_hook, zero_step_hook
from sharding import ZeroRedundancyOptimizer

pytestmark = [
    # The compiler reads the gradient of the loss.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.usefixtures("world_of_one", "fresh_compiler"),
]

Trainee = tuple[nn.Module, Callable[[], None]]
"""Module to call, and function to call after backward."""


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def in_backward(optimizer_class: Any, kwargs: dict[str, Any]) -> Trainee:
    module = model()
    apply_optimizer_in_backward(optimizer_class, module.parameters(), kwargs, ddp=False)
    return module, lambda: None


def in_a_hook() -> Trainee:
    ddp = DistributedDataParallel(model())
    step_hook(ddp, adamw(lr=0.1))
    return ddp, ddp.zero_grad


def in_the_hook_of_zero() -> Trainee:
    ddp = DistributedDataParallel(model())
    zero = ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.AdamW, lr=0.1, overlap_with_ddp=True
    )
    ddp.register_comm_hook(None, zero_step_hook(ddp, zero))
    return ddp, ddp.zero_grad


def by_zero() -> Trainee:
    module = model()
    zero = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=0.1)

    def step() -> None:
        zero.step()
        zero.zero_grad()

    return module, step


TRAINEES: dict[str, Callable[[], Trainee]] = {
    "torch's in backward": lambda: in_backward(torch.optim.AdamW, {"lr": 0.1, "foreach": False}),
    "ours in backward": lambda: in_backward(adamw, {"lr": 0.1}),
    "step_hook": in_a_hook,
    "zero_step_hook": in_the_hook_of_zero,
    "zero": by_zero,
}


def train(trainee: Trainee, compile_: Callable[..., Any]) -> list[Tensor]:
    module, after = trainee

    def iteration(x: Tensor) -> None:
        module(x).square().sum().backward()
        after()

    step = compile_(iteration)
    for seed in range(3):
        step(torch.randn(2, 4, generator=torch.Generator().manual_seed(seed)))
    return [param.detach().clone() for param in module.parameters()]


@pytest.mark.parametrize("name", TRAINEES)
def test_hooks_step_as_outside_of_compiled_code(name: str) -> None:
    """Parameters of one shape have separate states, whichever optimizer steps them."""
    got = train(TRAINEES[name](), lambda function: torch.compile(function, backend="eager"))
    want = train(TRAINEES[name](), lambda function: function)
    for one, other, begun in zip(got, want, model().parameters(), strict=True):
        assert torch.equal(one, other)
        assert not torch.equal(one, begun)
