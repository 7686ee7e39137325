"""torch's schedulers over optimizers whose chain has its own schedule."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedules

from functional_optim import (
    TorchOptimizer,
    accumulate,
    adamw,
    chain,
    ema,
    freeze,
    linear,
    lookahead,
    sgd,
)
from functional_optim.remote import DistributedOptimizer
from sharding import ZeroRedundancyOptimizer
from tests.choices import each

from .test_lr_schedulers import ALL, CYCLED

pytestmark = pytest.mark.usefixtures("world_of_one")


def one() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "TorchOptimizer": lambda lr: TorchOptimizer([one()], sgd(lr)),
    "a group's own": lambda lr: TorchOptimizer([{"params": [one()], "lr": lr}], sgd(0.5)),
    "ZeRO": lambda lr: ZeroRedundancyOptimizer([one()], sgd(lr)),
    "ZeRO, a group's own": lambda lr: ZeroRedundancyOptimizer(
        [{"params": [one()], "lr": lr}], sgd(0.5)
    ),
}

MESSAGE = r"lr is the schedule halving, .*lr_scheduler.*number for lr, or leave out the scheduler"


def halving(made: float) -> float:
    return 1.0 * 0.5**made


def falling(made: float) -> float:
    """Return values that are also allowed for betas."""
    return 0.5 * 0.5**made


def step(optimizer: torch.optim.Optimizer) -> float:
    (param,) = optimizer.param_groups[0]["params"]
    param.grad = torch.ones_like(param)
    optimizer.step()
    return float(param.detach()[0])


@each(schedule=ALL, maker=MAKERS, steps=[0, 1])
def test_a_scheduler_beside_a_schedule_is_refused(schedule: str, maker: str, steps: int) -> None:
    """Fault 28: making the scheduler raises an error that names both, and changes nothing."""
    optimizer = MAKERS[maker](halving)
    for _ in range(steps):
        step(optimizer)
    before = [dict(group) for group in optimizer.param_groups]
    with pytest.raises(TypeError, match=MESSAGE):
        ALL[schedule](optimizer)
    assert list(map(dict, optimizer.param_groups)) == before
    assert step(optimizer) == 1.0 - 2.0 * (1.0 - 0.5 ** (steps + 1))


@each(schedule=ALL)
def test_a_scheduler_beside_a_loaded_schedule_is_refused(schedule: str) -> None:
    """Fault 28: loading a checkpoint makes new groups, over which a scheduler is refused too."""
    optimizer = TorchOptimizer([one()], sgd(0.5))
    optimizer.load_state_dict(TorchOptimizer([one()], sgd(halving)).state_dict())
    with pytest.raises(TypeError, match=MESSAGE):
        ALL[schedule](optimizer)


@each(schedule=ALL)
def test_a_scheduler_beside_a_schedule_on_workers_is_refused(schedule: str) -> None:
    """Fault 28: DistributedOptimizer refuses the scheduler, even if groups have other chains."""
    for optimizer in (sgd(halving), chain(freeze(("a",)), sgd(halving))):
        params = {"a": one(), "b": one()}
        made = DistributedOptimizer.over_threads(
            optimizer, params.items(), dict.fromkeys(params, "w")
        )
        with pytest.raises(TypeError, match=MESSAGE):
            ALL[schedule](made)
        made.close()


@each(schedule=CYCLED)
def test_a_momentum_that_is_scheduled_is_not_replaced(schedule: str) -> None:
    """Fault 28: a scheduled momentum, or a scheduled value of betas, is not replaced."""
    for optimizer in (adamw(0.1, betas=(falling, 0.9)), sgd(0.1, momentum=falling)):
        made = TorchOptimizer([one()], optimizer)
        with pytest.raises(TypeError, match="(betas|momentum) is the schedule falling"):
            CYCLED[schedule](made)


@each(maker=MAKERS)
def test_a_scheduler_that_is_not_torchs_is_refused_at_the_next_step(maker: str) -> None:
    """Another scheduler only writes ``initial_lr`` into the groups, so the next step raises."""
    optimizer = MAKERS[maker](halving)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    with pytest.raises(TypeError, match=MESSAGE):
        step(optimizer)


@each(maker=MAKERS)
def test_the_schedule_alone_is_followed_and_a_number_is_scheduled(maker: str) -> None:
    """Both remedies that the error names work."""
    optimizer = MAKERS[maker](halving)
    assert [step(optimizer) for _ in range(3)] == [0.0, -0.5, -0.75]
    assert optimizer.param_groups[0]["lr"] == halving
    assert optimizer.param_groups[0]["lr"](2.0) == 0.25
    assert "halving" in repr(optimizer)
    optimizer = MAKERS[maker](1.0)
    scheduler = schedules.ExponentialLR(optimizer, 0.5)
    for wanted in (0.0, -0.5, -0.75):
        assert step(optimizer) == wanted
        scheduler.step()


def test_a_number_put_in_its_place_is_scheduled() -> None:
    """A number that replaces the schedule can be scheduled, even after a refused scheduler."""
    optimizer = TorchOptimizer([one()], sgd(halving))
    with pytest.raises(TypeError, match=MESSAGE):
        schedules.ConstantLR(optimizer, 0.5)
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] = 1.0
    schedules.ConstantLR(optimizer, 0.5)
    assert step(optimizer) == 0.5


def test_it_is_copied_and_pickled_with_the_optimizer() -> None:
    optimizer = TorchOptimizer([one()], sgd(halving))
    step(optimizer)
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert step(twin) == -0.5
    other = TorchOptimizer([torch.zeros(2, requires_grad=True)], sgd(0.3))
    other.load_state_dict(optimizer.state_dict())
    assert step(other) == -0.5
    with pytest.raises(TypeError, match=MESSAGE):
        schedules.ConstantLR(other, 0.5)


@each(maker=["TorchOptimizer", "a group's own"])
def test_a_checkpoint_without_a_schedule_leaves_that_of_the_optimizer(maker: str) -> None:
    optimizer, other = MAKERS[maker](halving), MAKERS[maker](halving)
    step(optimizer)
    saved = optimizer.state_dict()
    del saved["param_groups"][0]["lr"]  # as in sharded checkpoints
    other.load_state_dict(saved)
    step(other)
    assert other.param_groups[0]["lr"](1.0) == 0.5
    assert float(other.param_groups[0]["params"][0].detach()[0]) == 0.5


BESIDE: dict[str, Callable[..., Any]] = {
    "ema": lambda own: chain(own, ema(0.9)),
    "accumulate": lambda own: chain(accumulate(1), own),
    "lookahead": lambda own: chain(own, lookahead(1, alpha=1.0)),
}
"""Wrappers with state of their own, which change no parameter here."""


@each(beside=BESIDE)
def test_momentum_may_be_turned_on_beside_other_state(beside: str) -> None:
    """As in torch.optim, OneCycleLR may begin in mid-run. It turns on momentum."""
    found = []
    for wrap in (None, BESIDE[beside]):
        weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
        own: Any = torch.optim.SGD([weight], lr=0.1)
        if wrap is not None:
            own = TorchOptimizer([weight], wrap(sgd(lr=0.1)))
        for step in range(8):
            if step == 3:
                scheduler = schedules.OneCycleLR(own, 0.1, total_steps=10)
            weight.grad = weight.detach() + step
            own.step()
            if step >= 3:
                scheduler.step()
        found.append(weight.detach())
    assert torch.equal(*found)


def test_momentum_with_dampening_is_not_turned_on_beside_other_state() -> None:
    """The first gradient in a buffer is not damped, and ``ema`` needs the step count."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = TorchOptimizer([weight], chain(sgd(lr=0.1, dampening=0.5), ema(0.9)))
    weight.grad = torch.ones(2)
    optimizer.step()
    optimizer.param_groups[0]["momentum"] = 0.9
    before = weight.detach().clone()
    with pytest.raises(ValueError, match="momentum_buffer, which sgd needs since momentum was cha"):
        optimizer.step()
    assert torch.equal(weight.detach(), before)


@each(wrapped=[False, True])
def test_a_schedule_goes_on_if_momentum_is_turned_on(wrapped: bool) -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    own = sgd(lr=linear(1.0, to=0.0, steps=4))
    optimizer = TorchOptimizer([weight], chain(own, ema(0.9)) if wrapped else own)
    moved = []
    for step in range(4):
        if step == 2:
            optimizer.param_groups[0]["momentum"] = 0.5
        weight.grad, before = torch.ones(1), weight.item()
        optimizer.step()
        moved.append(before - weight.item())
    assert moved == [1.0, 0.75, 0.5, 0.375]
