"""State dicts of DistributedOptimizer over threads: to other workers, to torch, and back."""

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import sharding
from functional_optim import (
    DistributedOptimizer,
    TorchOptimizer,
    adamw,
)

from .support import assert_same, gradients, noise, parameters, placement

over_threads = DistributedOptimizer.over_threads


@pytest.mark.usefixtures("world_of_one")
def test_state_goes_to_other_front_ends_and_back() -> None:
    params = parameters()
    optimizer = over_threads(torch.optim.AdamW, params, placement(3), lr=0.1)
    optimizer.step(gradients(0))
    copies: list[dict[str, Tensor]] = [
        {name: param.detach().clone().requires_grad_() for name, param in params.items()}
        for _ in range(2)
    ]
    others = (
        sharding.ZeroRedundancyOptimizer(copies[0].items(), torch.optim.AdamW, lr=0.9),
        TorchOptimizer(copies[1].items(), adamw(lr=0.9)),
    )
    saved = optimizer.state_dict()
    for other in others:
        other.load_state_dict(saved)
    for step in (1, 2):
        optimizer.step(gradients(step))
        for copy, other in zip(copies, others, strict=True):
            for name, grad in gradients(step).items():
                copy[name].grad = grad
            other.step()
            assert_same(params, copy)
        others[0].consolidate_state_dict()
        for other in others:
            optimizer.load_state_dict(other.state_dict())
    optimizer.close()


def test_distributed_checkpoint_takes_the_state_and_no_step_is_made() -> None:
    """In fault 10, torch found ``state`` empty, and left a learning rate of 0."""
    model, twin = (torch.nn.Linear(3, 2) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    optimizer = over_threads(torch.optim.AdamW, model, {"weight": "a", "bias": "b"}, lr=0.1)
    other = torch.optim.AdamW(twin.parameters(), lr=0.1, foreach=False)
    for step in range(2):
        given = {name: noise(step, *param.shape) for name, param in model.named_parameters()}
        optimizer.step(given)
        for name, param in twin.named_parameters():
            param.grad = given[name]
        other.step()
        state = get_optimizer_state_dict(model, optimizer)
        assert optimizer.param_groups[0]["lr"] == 0.1
        assert all(param.grad is None for param in model.parameters())
        want = get_optimizer_state_dict(twin, other)["state"]
        assert want.keys() == state["state"].keys()
        for path, entries in want.items():
            assert_same(state["state"][path], entries)
    optimizer.close()
