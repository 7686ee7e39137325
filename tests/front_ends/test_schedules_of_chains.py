"""A chain with a schedule of its own, in a torch.optim.Optimizer: what torch's schedulers meet."""

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import lr_scheduler as schedules
from torch.optim import swa_utils

from functional_optim import TorchOptimizer, adamw, sgd
from sharding import ZeroRedundancyOptimizer

Make = Callable[[Any], torch.optim.Optimizer]

MAKERS: dict[str, Make] = {
    "TorchOptimizer": lambda lr: TorchOptimizer([torch.ones(2, requires_grad=True)], sgd(lr)),
    "a group's own": lambda lr: TorchOptimizer(
        [{"params": [torch.ones(2, requires_grad=True)], "lr": lr}], sgd(0.5)
    ),
    "ZeRO": lambda lr: ZeroRedundancyOptimizer([torch.ones(2, requires_grad=True)], sgd(lr)),
    "ZeRO, a group's own": lambda lr: ZeroRedundancyOptimizer(
        [{"params": [torch.ones(2, requires_grad=True)], "lr": lr}], sgd(0.5)
    ),
}

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda one: schedules.LambdaLR(one, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda one: schedules.MultiplicativeLR(one, lambda epoch: 0.8),
    "StepLR": lambda one: schedules.StepLR(one, 1, 0.5),
    "MultiStepLR": lambda one: schedules.MultiStepLR(one, [1, 4], 0.3),
    "ConstantLR": lambda one: schedules.ConstantLR(one, 0.25, 3),
    "LinearLR": lambda one: schedules.LinearLR(one, 0.1, 1.0, 5),
    "ExponentialLR": lambda one: schedules.ExponentialLR(one, 0.7),
    "PolynomialLR": lambda one: schedules.PolynomialLR(one, 6, 2.0),
    "CosineAnnealingLR": lambda one: schedules.CosineAnnealingLR(one, 4, 0.001),
    "CosineAnnealingWarmRestarts": lambda one: schedules.CosineAnnealingWarmRestarts(one, 3, 2),
    "ReduceLROnPlateau": lambda one: schedules.ReduceLROnPlateau(one, factor=0.5, patience=0),
    "SWALR": lambda one: swa_utils.SWALR(one, swa_lr=0.01, anneal_epochs=4),
}

MESSAGE = r"lr is the schedule halving, .*lr_scheduler.*number for lr, or leave out the scheduler"


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def halving(made: float) -> float:
    return 1.0 * 0.5**made


def step(one: torch.optim.Optimizer) -> torch.Tensor:
    (param,) = one.param_groups[0]["params"]
    param.grad = torch.ones_like(param)
    one.step()
    return param.detach().clone()


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("maker", MAKERS)
def test_a_scheduler_beside_a_schedule_is_refused(maker: str, name: str) -> None:
    """When it is made, or else at the first step, and each names both (fault 23)."""
    one = MAKERS[maker](halving)
    with pytest.raises(TypeError, match=MESSAGE):  # noqa: PT012  the one or the other
        scheduler = SCHEDULERS[name](one)
        step(one)
        scheduler.step(*[1.0] * isinstance(scheduler, schedules.ReduceLROnPlateau))
        scheduler.step(*[2.0] * isinstance(scheduler, schedules.ReduceLROnPlateau))


@pytest.mark.parametrize("maker", MAKERS)
def test_so_is_one_that_comes_after_steps(maker: str) -> None:
    """The options were looked at by then (fault 23)."""
    one = MAKERS[maker](halving)
    step(one)
    with pytest.raises(TypeError, match=MESSAGE):  # noqa: PT012
        schedules.StepLR(one, 5, 0.5)
        step(one)


@pytest.mark.parametrize("maker", MAKERS)
def test_the_schedule_alone_is_followed(maker: str) -> None:
    one = MAKERS[maker](halving)
    assert [step(one)[0].item() for _ in range(3)] == [0.0, -0.5, -0.75]
    assert one.param_groups[0]["lr"] == halving
    assert one.param_groups[0]["lr"](2.0) == 0.25
    assert "halving" in repr(one)


@pytest.mark.parametrize("maker", MAKERS)
def test_the_two_ways_out_are_ways(maker: str) -> None:
    """A number for the scheduler (fault 23)."""
    one = MAKERS[maker](1.0)
    scheduler = schedules.ExponentialLR(one, 0.5)
    for wanted in (0.0, -0.5, -0.75):
        assert step(one)[0].item() == wanted
        scheduler.step()


def test_a_number_put_in_its_place_is_scheduled() -> None:
    """Also after a scheduler was refused."""
    one = MAKERS["TorchOptimizer"](halving)
    with pytest.raises(TypeError, match=MESSAGE):
        schedules.ConstantLR(one, 0.5)
    for group in one.param_groups:
        group["lr"] = group["initial_lr"] = 1.0
    schedules.ConstantLR(one, 0.5)
    assert step(one)[0].item() == 0.5


def test_a_scheduler_that_sets_the_rate_by_itself_replaces_the_schedule() -> None:
    """As it replaces a number."""
    one = TorchOptimizer([torch.ones(2, requires_grad=True)], adamw(halving))
    schedules.OneCycleLR(one, 0.5, total_steps=4)
    step(one)
    assert isinstance(one.param_groups[0]["lr"], float)


def test_it_is_copied_and_pickled_with_the_optimizer() -> None:
    one = TorchOptimizer([torch.ones(2, requires_grad=True)], sgd(halving))
    step(one)
    file = io.BytesIO()
    pickle.dump(one, file)
    file.seek(0)
    for twin in (copy.deepcopy(one), pickle.load(file)):
        assert step(twin)[0].item() == -0.5
    other = TorchOptimizer([torch.zeros(2, requires_grad=True)], sgd(0.3))
    other.load_state_dict(one.state_dict())
    assert step(other)[0].item() == -0.5
    with pytest.raises(TypeError, match=MESSAGE):
        schedules.ConstantLR(other, 0.5)
