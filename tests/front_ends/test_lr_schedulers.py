"""torch.optim.lr_scheduler over TorchOptimizer and over torch's class, with equal bits."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedules
from torch.optim import swa_utils

from functional_optim import TorchOptimizer, adamw, chain, clip_by_global_norm
from tests.choices import each

from .support import Params, Twins, params_of, twins

STEPS = 7

Make = Callable[[torch.optim.Optimizer], Any]

SCHEDULES: dict[str, Make] = {
    "LambdaLR": lambda one: schedules.LambdaLR(one, lambda epoch: 0.9**epoch),
    "LambdaLR warm-up": lambda one: schedules.LambdaLR(one, lambda epoch: (epoch + 1) / STEPS),
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
"""Schedules that start from the lr of a group."""

SETTING: dict[str, Make] = {
    "ChainedScheduler": lambda one: schedules.ChainedScheduler(
        [schedules.ConstantLR(one, 0.5, 3), schedules.ExponentialLR(one, 0.9)]
    ),
    "SequentialLR": lambda one: schedules.SequentialLR(
        one,
        [schedules.LinearLR(one, 0.1, 1.0, 3), schedules.CosineAnnealingLR(one, 6)],
        milestones=[3],
    ),
    "CyclicLR": lambda one: schedules.CyclicLR(one, 0.01, 0.2, 3, cycle_momentum=False),
    "OneCycleLR": lambda one: schedules.OneCycleLR(
        one, 0.5, total_steps=STEPS + 1, cycle_momentum=False
    ),
}

CYCLED: dict[str, Make] = {
    "CyclicLR with momentum": lambda one: schedules.CyclicLR(
        one, 0.01, 0.2, 3, cycle_momentum=True, base_momentum=0.7, max_momentum=0.95
    ),
    "OneCycleLR with momentum": lambda one: schedules.OneCycleLR(one, 0.5, total_steps=STEPS + 1),
    "OneCycleLR in three phases": lambda one: schedules.OneCycleLR(
        one, 0.5, total_steps=STEPS + 1, three_phase=True, anneal_strategy="linear"
    ),
}

ALL = {**SCHEDULES, **SETTING, **CYCLED}


def small(params: Params) -> Params:
    return params[2:]


def in_groups(params: Params) -> list[dict[str, Any]]:
    return [{"params": params[2:3]}, {"params": params[3:], "lr": 0.01}]


def advance(schedule: Any, seed: int) -> None:
    """Make one step of a schedule."""
    plateau = isinstance(schedule, schedules.ReduceLROnPlateau)
    schedule.step(*[float(seed % 3)] * plateau)


def run(pair: Twins, make: Make, steps: int = STEPS) -> list[Any]:
    """Run both optimizers under the same schedule, and check that all options stay equal."""
    seen = set[float]()
    made = [make(one) for one in pair.both]
    for seed in range(steps):
        seen.add(float(pair.ours.param_groups[0]["lr"]))
        pair.step(seed, without={seed % 4} if seed % 2 else ())
        for schedule in made:
            advance(schedule, seed)
        for mine, theirs in zip(pair.ours.param_groups, pair.theirs.param_groups, strict=True):
            shared = (mine.keys() & theirs.keys()) - {"params"}
            assert shared >= set(pair.ours.defaults) - {"differentiable"}
            assert {key: mine[key] for key in shared} == {key: theirs[key] for key in shared}
    pair.assert_same()
    assert len(seen) > 1
    return made


def test_every_scheduler_of_torch_is_here() -> None:
    named = {
        name
        for name, value in vars(schedules).items()
        if inspect.isclass(value) and value.__module__ == schedules.__name__ and name[0] != "_"
    }
    ends = ("LR", "Restarts", "Plateau", "Scheduler")
    here = {name.split()[0] for name in ALL} - {"SWALR"}
    assert {name for name in named if name.endswith(ends)} - {"LRScheduler"} == here


NAMES = ["SGD nesterov", "AdamW amsgrad maximize", "Adagrad"]


@each(schedule=ALL, name=NAMES, groups=[small, in_groups])
def test_a_schedule_is_the_same_on_torch_s_class(schedule: str, name: str, groups: Any) -> None:
    """Schedules that cycle momentum agree too; a class without momentum refuses them like torch."""
    pair = twins(name, groups=groups)
    if schedule in CYCLED and not pair.ours.defaults.keys() & {"betas", "momentum"}:
        for one in pair.both:
            with pytest.raises(ValueError, match="momentum"):
                ALL[schedule](one)
        return
    run(pair, ALL[schedule])
    key = "betas" if "betas" in pair.ours.defaults else "momentum"
    if schedule in CYCLED:
        assert pair.ours.param_groups[0][key] != pair.ours.chain.hyper[key]


@each(schedule={**SCHEDULES, **SETTING}, cls=[torch.optim.SGD, torch.optim.AdamW])
def test_a_tensor_lr_is_scheduled_in_place(schedule: str, cls: Any) -> None:
    pair = twins((cls, {}), groups=small)
    for one in pair.both:
        one.param_groups[0]["lr"] = torch.tensor(0.1, dtype=torch.float64)
    tensor = pair.ours.param_groups[0]["lr"]
    made = [ALL[schedule](one) for one in pair.both]
    for seed in range(3):
        pair.step(seed)
        for one in made:
            advance(one, seed)
        assert pair.ours.param_groups[0]["lr"] is tensor
        assert torch.equal(tensor, pair.theirs.param_groups[0]["lr"])


@each(name=["SGD momentum", "AdamW"])
def test_a_run_is_resumed_with_its_schedule(name: str) -> None:
    pair, fresh = twins(name), twins(name)
    made = run(pair, ALL["SequentialLR"])
    resumed = [ALL["SequentialLR"](one) for one in fresh.both]
    for source, target in zip(pair.both, fresh.both, strict=True):
        target.load_state_dict(copy.deepcopy(source.state_dict()))
        with torch.no_grad():
            for old, new in zip(params_of(source), params_of(target), strict=True):
                new.copy_(old)
    for old, new in zip(made, resumed, strict=True):
        new.load_state_dict(old.state_dict())
    for seed in range(20, 23):
        fresh.step(seed)
        fresh.assert_same()
        for schedule in resumed:
            schedule.step()
        assert fresh.ours.param_groups[0]["lr"] == fresh.theirs.param_groups[0]["lr"]


def test_no_warning_about_the_order_of_steps() -> None:
    # torch warns if a schedule steps before its optimizer, and a warning is an error here.
    pair = twins("AdamW")
    schedule = schedules.StepLR(pair.ours, 1)
    pair.step(0)
    schedule.step()
    late = schedules.StepLR(twins("AdamW").ours, 1)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        late.step()


def test_a_chain_s_other_options_can_be_scheduled_by_hand() -> None:
    params = [torch.nn.Parameter(torch.zeros(2))]
    optimizer = TorchOptimizer(params, chain(clip_by_global_norm(1.0), adamw(0.1)))
    schedule = schedules.LambdaLR(optimizer, lambda epoch: 1.0 / (epoch + 1))
    for _ in range(3):
        optimizer.param_groups[0]["max_norm"] *= 0.5
        params[0].grad = torch.ones(2)
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["max_norm"] == 0.125
    assert schedule.get_last_lr() == [0.1 / 4]
