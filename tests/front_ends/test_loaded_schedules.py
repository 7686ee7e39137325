"""Checkpoints whose numbers replace the schedules of an optimizer: a warning says so."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from functional_optim import TorchOptimizer, adamw, linear
from functional_optim.frontends.local_optimizer import local_optimizer
from sharding import ZeroRedundancyOptimizer
from sharding.transport.local import LocalWorld

SCHEDULE = linear(0.25, to=0.0, steps=10)
TOLD = r"param_groups\[0\]\['lr'\] is a schedule, and the checkpoint has .*0\.3.* there"


def checkpoint(param: nn.Parameter) -> dict[str, Any]:
    return torch.optim.AdamW([param], lr=0.3).state_dict()


def test_a_number_that_replaces_a_schedule_is_told() -> None:
    param = nn.Parameter(torch.ones(2))
    optimizer = TorchOptimizer([param], adamw(lr=SCHEDULE))
    with pytest.warns(UserWarning, match=TOLD):
        optimizer.load_state_dict(checkpoint(param))
    assert optimizer.param_groups[0]["lr"] == 0.3
    optimizer.param_groups[0]["lr"] = SCHEDULE
    param.grad = torch.ones(2)
    optimizer.step()
    twin = nn.Parameter(torch.ones(2))
    other = TorchOptimizer([twin], adamw(lr=SCHEDULE))
    twin.grad = torch.ones(2)
    other.step()
    assert torch.equal(param, twin)


def test_zero_tells_it_too() -> None:
    param = nn.Parameter(torch.ones(2))
    zero = ZeroRedundancyOptimizer([param], adamw(lr=SCHEDULE), LocalWorld(1).groups[0])
    with pytest.warns(UserWarning, match=TOLD):
        zero.load_state_dict(checkpoint(param))
    assert zero.param_groups[0]["lr"] == 0.3


def test_its_own_checkpoint_keeps_the_schedule_and_says_nothing() -> None:
    param = nn.Parameter(torch.ones(2))
    optimizer = TorchOptimizer([param], adamw(lr=SCHEDULE))
    local = local_optimizer(adamw(lr=SCHEDULE), [param])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for one in (optimizer, local):
            one.load_state_dict(one.state_dict())
            assert one.param_groups[0]["lr"](0.0) == 0.25
