"""State dicts of DistributedOptimizer over threads: to other workers, to torch, and back."""

from typing import Any

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

from .support import SHAPES, assert_same, gradients, noise, parameters, placement

over_threads = DistributedOptimizer.over_threads


def test_state_moves_to_other_workers_and_to_torch_and_back() -> None:
    params = parameters()
    optimizer = over_threads(torch.optim.AdamW, params, placement(3), lr=0.1, amsgrad=True)
    twins = parameters()
    twin = torch.optim.AdamW(twins.items(), lr=0.1, amsgrad=True, foreach=False)
    steps = iter(range(100))

    def both(one: Any, other: torch.optim.Optimizer) -> None:
        given_now = gradients(next(steps))
        one.step(given_now)
        for name, grad in given_now.items():
            twins[name].grad = grad
        other.step()

    both(optimizer, twin)
    saved = optimizer.state_dict()
    assert saved["workers"]["ps0"] == ["embed.weight", "scale"]
    assert saved["param_groups"][0]["param_names"] == list(SHAPES)
    optimizer.close()

    moved = over_threads(torch.optim.AdamW, params, placement(2, shift=1), lr=0.7)
    moved.load_state_dict(saved)
    assert moved.param_groups[0]["lr"] == 0.1
    assert moved.param_groups[0]["amsgrad"]
    both(moved, twin)
    plain = torch.optim.AdamW(twins.items(), lr=0.9, foreach=False)
    plain.load_state_dict(moved.state_dict())
    both(moved, plain)
    moved.load_state_dict(plain.state_dict())
    both(moved, plain)
    moved.close()
    assert_same(params, twins)


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


def test_a_state_that_one_worker_refuses_changes_none() -> None:
    params = parameters()
    optimizer = over_threads(torch.optim.AdamW, params, placement(2), lr=0.1)
    optimizer.step(gradients(0))
    before = optimizer.state_dict()
    wrong = optimizer.state_dict()
    wrong["param_groups"][0]["lr"] = 0.9
    wrong["state"][0]["exp_avg"].zero_()
    wrong["state"][1]["exp_avg"] = torch.zeros(7)
    with pytest.raises(ValueError, match=r"load_state_dict failed on 1 of 2 workers:\n  ps1: "):
        optimizer.load_state_dict(wrong)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for number, entries in before["state"].items():
        assert all(
            torch.equal(value, after["state"][number][key]) for key, value in entries.items()
        )
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
