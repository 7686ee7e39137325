"""Frozen parameters in front-ends with torch's interface: schedulers and checkpoint helpers."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from functional_optim import (
    Optimizer,
    TorchOptimizer,
    adamw,
    chain,
    freeze,
    labels,
    matching,
    muon,
    partition,
    sgd,
)
from functional_optim.remote import DistributedOptimizer
from sharding import ZeroRedundancyOptimizer
from tests.choices import each

from ..tensors import assert_same, normal
from .test_lr_schedulers import CYCLED, SCHEDULES, SETTING, advance

pytestmark = pytest.mark.usefixtures("world_of_one")

FROZEN: dict[str, Callable[[], Optimizer]] = {
    "a part": lambda: partition(
        {"frozen": freeze(), "rest": adamw(0.1)},
        labels({"frozen": matching("0.*")}, default="rest"),
    ),
    "the last part": lambda: partition(
        {"rest": adamw(0.1), "frozen": freeze()},
        labels({"frozen": matching("2.*")}, default="rest"),
    ),
    "a stage": lambda: chain(freeze(("0.weight",)), adamw(0.1)),
}


def model() -> nn.Module:
    made = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1))
    for k, param in enumerate(made.parameters()):
        param.data = normal(*param.shape, seed=k)
    return made


def step(of: nn.Module, optimizer: Any, seed: int) -> None:
    of.zero_grad()
    of(normal(4, 3, seed=seed)).square().sum().backward()
    optimizer.step()


def frozen_groups(optimizer: Any) -> list[dict[str, Any]]:
    return [group for group in optimizer.param_groups if "betas" not in group]


DOORS: dict[str, Callable[[nn.Module, Optimizer], Any]] = {
    "TorchOptimizer": lambda of, one: TorchOptimizer(of.named_parameters(), one),
    "ZeRO": lambda of, one: ZeroRedundancyOptimizer(of.named_parameters(), one),
}


@each(schedule={**SCHEDULES, **SETTING}, name=FROZEN, door=DOORS)
def test_every_scheduler_of_torch_takes_a_frozen_group(schedule: str, name: str, door: str) -> None:
    """Fault 18: a frozen group changes no learning rate of the other groups."""
    made, plain = model(), model()
    optimizer = DOORS[door](made, FROZEN[name]())
    trained = {p for group in optimizer.param_groups if "betas" in group for p in group["params"]}
    frozen = {k: p.detach().clone() for k, p in made.named_parameters() if p not in trained}
    assert frozen
    names = [k for k, _ in made.named_parameters() if k not in frozen]
    other = torch.optim.AdamW([plain.get_parameter(k) for k in names], 0.1)
    schedulers = [{**SCHEDULES, **SETTING}[schedule](one) for one in (optimizer, other)]
    for seed in range(4):
        step(made, optimizer, seed)
        step(plain, other, seed)
        for one in schedulers:
            advance(one, seed)
        rates = [group["lr"] for group in optimizer.param_groups if "betas" in group]
        assert rates == [other.param_groups[0]["lr"]] * len(rates)
    for key, param in made.named_parameters():
        assert_same(param.detach(), frozen.get(key, plain.get_parameter(key).detach()))


@each(schedule={**SCHEDULES, **SETTING}, name=FROZEN)
def test_so_does_one_over_workers(schedule: str, name: str) -> None:
    """Fault 18: schedulers accept a DistributedOptimizer with a frozen group."""
    made = model()
    placement = dict.fromkeys(dict(made.named_parameters()), "worker")
    optimizer = DistributedOptimizer.over_threads(FROZEN[name](), made, placement)
    try:
        scheduler = {**SCHEDULES, **SETTING}[schedule](optimizer)
        grads = {key: torch.ones_like(param) for key, param in made.named_parameters()}
        optimizer.step(grads)
        advance(scheduler, 0)
    finally:
        optimizer.close()


def test_over_workers_momentum_is_cycled_in_every_part() -> None:
    made = model()
    placement = dict.fromkeys(dict(made.named_parameters()), "worker")
    optimizer = DistributedOptimizer.over_threads(PARTS["override"](), made, placement)
    try:
        scheduler = CYCLED["OneCycleLR with momentum"](optimizer)
        optimizer.step({key: torch.ones_like(param) for key, param in made.named_parameters()})
        advance(scheduler, 0)
        assert len({group["betas"] for group in optimizer.param_groups}) == 1
    finally:
        optimizer.close()


PARTS: dict[str, Callable[[], Optimizer]] = {
    "override": lambda: adamw(0.1).override(matching("*bias"), weight_decay=0.0),
    "partition": lambda: partition(
        {"matrix": adamw(0.1), "rest": adamw(0.1, weight_decay=0.0)},
        labels({"rest": matching("*bias")}, default="matrix"),
    ),
}


@each(schedule=CYCLED, name=PARTS, door=DOORS)
def test_momentum_is_cycled_in_every_part(schedule: str, name: str, door: str) -> None:
    """Every part gets the scheduled momentum: the scheduler looks for it in ``defaults``."""
    made, plain = model(), model()
    optimizer = DOORS[door](made, PARTS[name]())
    named = dict(plain.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for key, p in named.items() if not key.endswith("bias")]},
        {"params": [p for key, p in named.items() if key.endswith("bias")], "weight_decay": 0.0},
    ]
    other = torch.optim.AdamW(groups, 0.1)
    schedulers = [CYCLED[schedule](one) for one in (optimizer, other)]
    for seed in range(4):
        step(made, optimizer, seed)
        step(plain, other, seed)
        for one in schedulers:
            advance(one, seed)
        betas = {group["betas"] for group in optimizer.param_groups}
        assert betas == {other.param_groups[0]["betas"]}
    for key, param in made.named_parameters():
        assert_same(param.detach(), named[key].detach())


def test_options_that_some_groups_lack_are_no_defaults() -> None:
    """``defaults`` lacks an option that some groups lack, and a later group does not get it."""
    frozen = DOORS["TorchOptimizer"](model(), FROZEN["a part"]())
    assert frozen.defaults == {}
    with pytest.raises(ValueError, match="cycle_momentum"):
        CYCLED["OneCycleLR with momentum"](frozen)
    assert DOORS["TorchOptimizer"](model(), FROZEN["the last part"]()).defaults == {}
    optimizer = DOORS["TorchOptimizer"](model(), PARTS["partition"]())
    assert "betas" in optimizer.defaults
    more = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [("more.bias", more)], "lr": 0.5})
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1, 0.5]
    assert optimizer.param_groups[2]["weight_decay"] == 0.0


def test_a_frozen_group_has_the_rate_that_it_is_given() -> None:
    given = [{"params": list(model().named_parameters()), "lr": 0.25}]
    optimizer = TorchOptimizer(given, FROZEN["a part"]())
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]
    assert [
        group["lr"] for group in frozen_groups(DOORS["TorchOptimizer"](model(), FROZEN["a part"]()))
    ] == [0.0]


def test_a_checkpoint_without_a_rate_for_frozen_parameters_loads() -> None:
    """Fault 18: checkpoints of earlier versions have no lr and no state for frozen parameters."""
    made = model()
    optimizer = DOORS["TorchOptimizer"](made, FROZEN["a part"]())
    step(made, optimizer, 0)
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["param_groups"][0]["lr"], saved["state"][0], saved["state"][1]
    other = DOORS["TorchOptimizer"](model(), FROZEN["a part"]())
    other.load_state_dict(saved)
    assert frozen_groups(other)[0]["lr"] == 0.0
    assert_same(other.state_dict()["state"], optimizer.state_dict()["state"])


HELPED = [{}, {"flatten_optimizer_state_dict": True}, {"full_state_dict": True}]


@each(name=FROZEN, options=HELPED, stepped=[False, True])
def test_torchs_strict_checkpoint_helpers_take_frozen_parameters(
    name: str, options: dict[str, bool], stepped: bool
) -> None:
    """Fault 18: torch's helpers accept frozen parameters, even those that require gradients."""
    results = []
    for stops in (False, True):
        made = model()
        optimizer = DOORS["TorchOptimizer"](made, FROZEN[name]())
        for seed in range(4):
            if seed == (2 if stepped else 0) and stops:
                helped = StateDictOptions(strict=True, **options)
                made.zero_grad()
                saved = get_optimizer_state_dict(made, optimizer, options=helped)
                optimizer = DOORS["TorchOptimizer"](made, FROZEN[name]())
                set_optimizer_state_dict(made, optimizer, saved, options=helped)
            step(made, optimizer, seed)
        results.append([param.detach() for param in made.parameters()])
    assert_same(*results)


@each(name=FROZEN)
def test_a_checkpoint_goes_from_door_to_door(name: str) -> None:
    """Fault 18: either front-end loads the other's file, where frozen parameters have no state."""
    results = []
    for source, opened in DOORS.items():
        for other in DOORS.values():
            made = model()
            optimizer = opened(made, FROZEN[name]())
            step(made, optimizer, 0)
            if source == "ZeRO":
                optimizer.consolidate_state_dict()
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            optimizer = other(made, FROZEN[name]())
            optimizer.load_state_dict(torch.load(file))
            step(made, optimizer, 1)
            results.append([param.detach() for param in made.parameters()])
    for one in results:
        assert_same(one, results[0])


@each(door=DOORS)
def test_a_group_that_is_refused_adds_no_part(door: str) -> None:
    """A group is refused because of its second part, and its new first part is not added."""
    made = model()
    chosen = partition(
        {"matrix": adamw(0.1), "rest": sgd(0.125)},
        labels({"rest": matching("*bias")}, default="matrix"),
    )
    optimizer = DOORS[door](made, chosen)
    step(made, optimizer, 0)
    before, defaults = len(optimizer.param_groups), dict(optimizer.defaults)
    new, bias = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [("new.weight", new), ("0.bias", made[0].bias)]})
    assert len(optimizer.param_groups) == before and optimizer.defaults == defaults
    assert new not in optimizer.state
    optimizer.add_param_group({"params": [("new.bias", bias)]})
    step(made, optimizer, 1)
    bias.grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(bias.detach(), torch.full((2,), 0.875))


def test_a_group_whose_state_cannot_be_made_is_not_added() -> None:
    weight, other = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(4))
    optimizer = TorchOptimizer([weight], muon(lr=0.1))
    with pytest.raises(ValueError, match="muon"):
        optimizer.add_param_group({"params": [other]})
    assert len(optimizer.param_groups) == 1 and other not in optimizer.state
    weight.grad = torch.ones(3, 2)
    optimizer.step()


@each(door=DOORS)
def test_a_first_group_may_be_empty(door: str) -> None:
    made = model()
    given = [{"params": []}, {"params": list(made.named_parameters()), "lr": 0.5}]
    cls = {"TorchOptimizer": TorchOptimizer, "ZeRO": ZeroRedundancyOptimizer}[door]
    optimizer = cls(given, PARTS["partition"]())
    assert {group["lr"] for group in optimizer.param_groups if group["params"]} == {0.5}
    step(made, optimizer, 0)
