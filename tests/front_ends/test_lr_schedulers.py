"""torch.optim.lr_scheduler over TorchOptimizer: the same schedule on torch's class, bit for bit."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedules
from torch.optim import swa_utils

from functional_optim import TorchOptimizer, adamw, chain, clip_by_global_norm

from .support import CASES, CLASSES, Case, Twins, params_of, twins

STEPS = 9

Make = Callable[[torch.optim.Optimizer], Any]

SCHEDULES: dict[str, Make] = {
    "LambdaLR": lambda one: schedules.LambdaLR(one, lambda epoch: 0.9**epoch),
    "LambdaLR warm-up": lambda one: schedules.LambdaLR(one, lambda epoch: (epoch + 1) / 9),
    "MultiplicativeLR": lambda one: schedules.MultiplicativeLR(one, lambda epoch: 0.8),
    "StepLR": lambda one: schedules.StepLR(one, 2, 0.5),
    "MultiStepLR": lambda one: schedules.MultiStepLR(one, [1, 4], 0.3),
    "ConstantLR": lambda one: schedules.ConstantLR(one, 0.25, 3),
    "LinearLR": lambda one: schedules.LinearLR(one, 0.1, 1.0, 5),
    "ExponentialLR": lambda one: schedules.ExponentialLR(one, 0.7),
    "PolynomialLR": lambda one: schedules.PolynomialLR(one, 6, 2.0),
    "CosineAnnealingLR": lambda one: schedules.CosineAnnealingLR(one, 4, 0.001),
    "CosineAnnealingWarmRestarts": lambda one: schedules.CosineAnnealingWarmRestarts(one, 3, 2),
    "ChainedScheduler": lambda one: schedules.ChainedScheduler(
        [schedules.ConstantLR(one, 0.5, 3), schedules.ExponentialLR(one, 0.9)]
    ),
    "SequentialLR": lambda one: schedules.SequentialLR(
        one,
        [schedules.LinearLR(one, 0.1, 1.0, 3), schedules.CosineAnnealingLR(one, 6)],
        milestones=[3],
    ),
    "ReduceLROnPlateau": lambda one: schedules.ReduceLROnPlateau(one, factor=0.5, patience=0),
    "CyclicLR": lambda one: schedules.CyclicLR(one, 0.01, 0.2, 3, cycle_momentum=False),
    "OneCycleLR": lambda one: schedules.OneCycleLR(
        one, 0.5, total_steps=STEPS + 1, cycle_momentum=False
    ),
    "SWALR": lambda one: swa_utils.SWALR(one, swa_lr=0.01, anneal_epochs=4),
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


def run(pair: Twins, make: Make) -> list[Any]:
    """Both optimizers under the same schedule; their groups stay equal in every option."""
    seen = set[float]()
    made = [(make(one), one) for one in (pair.ours, pair.theirs)]
    for seed in range(STEPS):
        seen.add(pair.ours.param_groups[0]["lr"])
        pair.step(seed, without={seed % 4} if seed % 2 else ())
        pair.assert_same()
        for schedule, _ in made:
            if isinstance(schedule, schedules.ReduceLROnPlateau):
                schedule.step(metrics=float(seed % 3))
            else:
                schedule.step()
        for mine, theirs in zip(pair.ours.param_groups, pair.theirs.param_groups, strict=True):
            shared = (mine.keys() & theirs.keys()) - {"params"}
            assert shared >= set(pair.ours.defaults) - {"differentiable"}
            assert {key: mine[key] for key in shared} == {key: theirs[key] for key in shared}
    assert len(seen) > 1
    return [schedule for schedule, _ in made]


def test_every_scheduler_of_torch_is_here() -> None:
    named = {
        name
        for name, value in vars(schedules).items()
        if inspect.isclass(value) and value.__module__ == schedules.__name__ and name[0] != "_"
    }
    here = {name.split()[0] for name in [*SCHEDULES, *CYCLED]} - {"SWALR"}
    assert {name for name in named if name.endswith(("LR", "Restarts", "Plateau", "Scheduler"))} - {
        "LRScheduler"
    } == here


@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("cls", CLASSES)
def test_a_schedule_is_the_same_on_torch_s_class(
    cls: type[torch.optim.Optimizer], make: Make
) -> None:
    run(twins((cls, {"lr": 0.1})), make)


@pytest.mark.parametrize("make", CYCLED.values(), ids=CYCLED)
@pytest.mark.parametrize(
    "name",
    ["SGD", "SGD momentum", "SGD nesterov", "Adam", "AdamW amsgrad maximize", "RMSprop momentum"],
)
def test_momentum_is_cycled(name: str, make: Make) -> None:
    pair = twins(CASES[name])
    run(pair, make)
    key = "betas" if "betas" in pair.ours.defaults else "momentum"
    assert pair.ours.param_groups[0][key] != pair.ours.optimizer.hyper[key]


@pytest.mark.parametrize("make", CYCLED.values(), ids=CYCLED)
def test_a_class_without_momentum_is_refused_as_torch_s_is(make: Make) -> None:
    pair = twins(CASES["Adagrad"])
    for one in (pair.theirs, pair.ours):
        with pytest.raises(ValueError, match="momentum"):
            make(one)


@pytest.mark.parametrize("name", ["SGD nesterov", "AdamW", "Rprop"])
@pytest.mark.parametrize("make", [SCHEDULES["LambdaLR"], SCHEDULES["OneCycleLR"]])
def test_groups_with_a_learning_rate_of_their_own(name: str, make: Make) -> None:
    def groups(params: list[Any]) -> Any:
        return [{"params": params[:1]}, {"params": params[1:], "lr": 0.01}]

    run(twins(CASES[name], groups=groups), make)


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES)
def test_a_tensor_lr_is_scheduled_in_place(cls: type[torch.optim.Optimizer], make: Make) -> None:
    pair = twins((cls, {}))
    for one in (pair.ours, pair.theirs):
        one.param_groups[0]["lr"] = torch.tensor(0.1, dtype=torch.float64)
    tensor = pair.ours.param_groups[0]["lr"]
    # The class's own arithmetic on a tensor lr is compared in test_changed_by_hand.py.
    made = [make(one) for one in (pair.ours, pair.theirs)]
    for seed in range(3):
        pair.step(seed)
        for schedule in made:
            if isinstance(schedule, schedules.ReduceLROnPlateau):
                schedule.step(metrics=float(seed))
            else:
                schedule.step()
        assert pair.ours.param_groups[0]["lr"] is tensor
        assert torch.equal(tensor, pair.theirs.param_groups[0]["lr"])


@pytest.mark.parametrize("case", [CASES["SGD momentum"], CASES["AdamW"]], ids=["SGD", "AdamW"])
def test_a_run_is_resumed_with_its_schedule(case: Case) -> None:
    make = SCHEDULES["SequentialLR"]
    pair, fresh = twins(case), twins(case)
    mine, theirs = run(pair, make)
    resumed = [make(one) for one in (fresh.ours, fresh.theirs)]
    for source, target in ((pair.ours, fresh.ours), (pair.theirs, fresh.theirs)):
        target.load_state_dict(copy.deepcopy(source.state_dict()))
        with torch.no_grad():
            for old, new in zip(params_of(source), params_of(target), strict=True):
                new.copy_(old)
    for source, target in zip((mine, theirs), resumed, strict=True):
        target.load_state_dict(source.state_dict())
    for seed in range(20, 24):
        fresh.step(seed)
        fresh.assert_same()
        for schedule in resumed:
            schedule.step()
        lrs = [one.param_groups[0]["lr"] for one in (fresh.ours, fresh.theirs)]
        assert lrs[0] == lrs[1]


def test_no_warning_about_the_order_of_steps() -> None:
    # torch warns (an error here) where a schedule steps before its optimizer.
    pair = twins(CASES["AdamW"])
    schedule = schedules.StepLR(pair.ours, 1)
    pair.step(0)
    schedule.step()
    late = schedules.StepLR(twins(CASES["AdamW"]).ours, 1)
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
