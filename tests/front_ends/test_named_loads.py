"""Loading state by name in every front-end, if checkpoint and optimizer have names."""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from functional_optim import (
    DistributedOptimizer,
    Optimizer,
    TorchOptimizer,
    adamw,
    chain,
    ema,
    freeze,
    labels,
    lbfgs,
    matching,
    partition,
    sgd,
)
from tests.choices import case

from .doors import DOORS, Sharded

NAMES = ("a.weight", "a.bias", "b.weight", "b.bias")
ORDERS = ([3, 1, 0, 2], [2, 3, 0, 1])

OPTIMIZERS: dict[str, Optimizer] = {
    "one chain": adamw(lr=0.1),
    "override": adamw(lr=0.1).override(matching("*.bias"), lr=0.3, weight_decay=0.0),
    "partition": partition(
        {
            "matrix": chain(sgd(lr=0.2, momentum=0.9), ema(0.5)),
            "rest": adamw(lr=0.1),
            "no": freeze(),
        },
        labels({"matrix": matching("*weight"), "no": matching("b.bias")}, default="rest"),
    ),
}


def params_of() -> dict[str, nn.Parameter]:
    """Return parameters of one shape, so that only their names differ."""
    return {name: nn.Parameter(torch.full((2, 2), float(k))) for k, name in enumerate(NAMES)}


def grads_of(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(2, 2, generator=generator) for name in NAMES}


def step(optimizer: Any, params: Mapping[str, nn.Parameter], seed: int) -> None:
    for name, grad in grads_of(seed).items():
        params[name].grad = grad
    optimizer.step()


def permuted(params: Mapping[str, nn.Parameter], order: list[int]) -> dict[str, nn.Parameter]:
    return {NAMES[k]: params[NAMES[k]] for k in order}


PAIRS = [
    (door, name)
    for door in DOORS
    for name in OPTIMIZERS
    if door != "local_optimizer" or name == "one chain"
]


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize(("door", "name"), PAIRS)
def test_parameters_in_another_order_get_their_own_state(door: str, name: str) -> None:
    """Fault 7: state was loaded by position, so a parameter got the state of another."""
    params = params_of()
    optimizer = DOORS[door](params, OPTIMIZERS[name])
    for seed in range(2):
        step(optimizer, params, seed)
    saved = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(params)
    step(optimizer, params, 2)
    for order in ORDERS:
        others = permuted(copy.deepcopy(kept), order)
        other = DOORS[door](others, OPTIMIZERS[name])
        other.load_state_dict(copy.deepcopy(saved))
        step(other, others, 2)
        with case(order=order):
            assert all(torch.equal(one, others[key]) for key, one in params.items())


def test_workers_take_groups_in_another_order() -> None:
    """Fault 7: groups were matched by index, and names only inside of each group."""
    placement = {name: f"worker{k % 2}" for k, name in enumerate(NAMES)}
    made = []
    for order in ((0, 1), (1, 0)):
        named = list(params_of().items())
        groups = [{"params": named[:2]}, {"params": named[2:], "lr": 1.0}]
        optimizer = DistributedOptimizer.over_threads(
            adamw(lr=0.1), [groups[k] for k in order], placement
        )
        made.append(optimizer)
        if order == (0, 1):
            optimizer.step(grads_of(0))
            saved = optimizer.state_dict()
        else:
            optimizer.load_state_dict(saved)
    states, rates = [], []
    for optimizer in made:
        found = optimizer.state_dict()
        names = [name for group in found["param_groups"] for name in group["param_names"]]
        states.append({name: found["state"][k]["exp_avg"] for k, name in enumerate(names)})
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.close()
    assert rates == [[0.1, 1.0], [1.0, 0.1]]
    assert all(torch.equal(states[0][name], states[1][name]) for name in NAMES)


def test_a_named_checkpoint_of_torch_is_loaded_by_name() -> None:
    params, others = params_of(), params_of()
    theirs = torch.optim.AdamW(params.items(), lr=0.1)
    step(theirs, params, 0)
    ours = DOORS["TorchOptimizer"](permuted(others, ORDERS[0]), adamw(lr=0.5))
    ours.load_state_dict(theirs.state_dict())
    for name, one in params.items():
        assert torch.equal(ours.state[others[name]]["exp_avg"], theirs.state[one]["exp_avg"])


def test_without_names_on_both_sides_positions_count() -> None:
    params = params_of()
    named, bare = (
        DOORS["TorchOptimizer"](params, adamw(lr=0.1)),
        TorchOptimizer(params.values(), adamw(lr=0.1)),
    )
    step(named, params, 0)
    saved = named.state_dict()
    bare.load_state_dict(saved)
    for group in saved["param_groups"]:
        del group["param_names"]
    others = permuted(params_of(), ORDERS[0])
    other = DOORS["TorchOptimizer"](others, adamw(lr=0.1))
    other.load_state_dict(saved)
    bares = bare.param_groups[0]["params"]
    for first, second, third in zip(params.values(), others.values(), bares, strict=True):
        wanted = named.state[first]["exp_avg"]
        assert torch.equal(other.state[second]["exp_avg"], wanted)
        assert torch.equal(bare.state[third]["exp_avg"], wanted)


def renamed(groups: list[dict[str, Any]]) -> None:
    groups[0]["param_names"][1] = "module.a.bias"


def regrouped(groups: list[dict[str, Any]]) -> None:
    first, second = groups
    first["param_names"][0], second["param_names"][0] = (
        second["param_names"][0],
        first["param_names"][0],
    )


def twice(groups: list[dict[str, Any]]) -> None:
    groups[0]["param_names"] += ["a.bias"]
    groups[0]["params"] += [9]


WRONG: dict[str, tuple[Callable[[list[dict[str, Any]]], None], str]] = {
    "renamed": (renamed, "the checkpoint has no 'a.bias'; the optimizer has no 'module.a.bias'"),
    "regrouped": (regrouped, "parameter group 0 of this optimizer has 'a.weight', 'a.bias'"),
    "twice": (twice, "two parameters of the checkpoint have the name 'a.bias'"),
}


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("door", ["TorchOptimizer", "ZeRO"])
def test_names_that_do_not_fit_are_refused_and_change_nothing(door: str, wrong: str) -> None:
    """Fault 7: the names of a checkpoint were ignored."""
    params = params_of()
    named = list(params.items())
    groups = [{"params": named[:2]}, {"params": named[2:], "lr": 0.5}]
    cls = {"TorchOptimizer": TorchOptimizer, "ZeRO": Sharded}[door]
    optimizer: Any = cls(groups, adamw(lr=0.1))
    step(optimizer, params, 0)
    before = repr(optimizer.state_dict())
    saved = copy.deepcopy(optimizer.state_dict())
    change, told = WRONG[wrong]
    change(saved["param_groups"])
    with pytest.raises(ValueError, match=told):
        optimizer.load_state_dict(saved)
    assert repr(optimizer.state_dict()) == before


def test_torchs_distributed_checkpoints_go_by_name_once() -> None:
    """torch's helpers reorder the state by name, and leave "param_names" in the old order.

    TorchOptimizer must not reorder the state a second time.
    """

    class Reversed(nn.Linear):
        def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
            return reversed(list(super().named_parameters(*args, **kwargs)))

    torch.manual_seed(0)
    model, other = nn.Linear(1, 1), Reversed(1, 1)
    optimizer, loaded = (
        TorchOptimizer(one.named_parameters(), adamw(lr=0.1)) for one in (model, other)
    )
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    set_optimizer_state_dict(other, loaded, get_optimizer_state_dict(model, optimizer))
    assert loaded.param_groups[0]["param_names"] == ["bias", "weight"]
    for name in ("weight", "bias"):
        one, two = getattr(model, name), getattr(other, name)
        assert torch.equal(optimizer.state[one]["exp_avg"], loaded.state[two]["exp_avg"])


def workers(params: Mapping[str, nn.Parameter], optimizer: Optimizer) -> Any:
    made = DistributedOptimizer.over_threads(
        optimizer, list(params.items()), dict.fromkeys(params, "worker")
    )
    step = partial(made.step)
    made.step = lambda: step({name: one.grad for name, one in params.items()})
    return made


LOSING: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "twice in a group": (
        lambda saved: saved["param_groups"][0].update(params=[0, 0, 2, 3]),
        r"number 0 twice, as params\[0\] of group 0 and as params\[1\] of group 0, .*; give each",
    ),
    "twice with names": (
        lambda saved: saved["param_groups"][0].update(params=[0, 1, 2, 1]),
        r"number 1 twice, as params\[1\] of group 0 and as params\[3\] of group 0",
    ),
    "in no group": (
        lambda saved: saved["state"].update({9: saved["state"][3]}),
        r"parameter number 9, which is in none of its groups .*; add .* or remove its state",
    ),
}
"""Checkpoints whose loading would lose state, and their errors."""


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("name", LOSING)
@pytest.mark.parametrize("door", [*DOORS, "workers"])
def test_a_checkpoint_whose_loading_would_lose_state_changes_nothing(door: str, name: str) -> None:
    """A number that is listed twice gave a KeyError, and unknown numbers were kept."""
    params = params_of()
    optimizer = (DOORS | {"workers": workers})[door](params, adamw(lr=0.1))
    step(optimizer, params, 0)
    before = copy.deepcopy(optimizer.state_dict())
    change, told = LOSING[name]
    saved = copy.deepcopy(before)
    change(saved)
    with pytest.raises(ValueError, match=told):
        optimizer.load_state_dict(saved)
    assert repr(optimizer.state_dict()) == repr(before)
    step(optimizer, params, 1)
    if door == "workers":
        optimizer.close()


def test_a_number_in_two_groups_is_refused_and_names_both() -> None:
    groups = [{"params": [one], "lr": 0.1} for one in params_of().values()]
    optimizer = TorchOptimizer(groups, adamw(lr=0.1))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][2]["params"] = [1]
    before = repr(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"as params\[0\] of group 1 and as params\[0\] of gro"):
        optimizer.load_state_dict(saved)
    assert repr(optimizer.state_dict()) == before


def test_two_numbers_for_a_parameter_that_is_given_twice_are_refused() -> None:
    """The state of the first number was dropped."""
    param = nn.Parameter(torch.ones(2))
    with pytest.warns(UserWarning, match="duplicate"):
        optimizer = TorchOptimizer([param, param], adamw(lr=0.1))
    optimizer.load_state_dict(optimizer.state_dict())  # one number, listed twice
    saved = TorchOptimizer([nn.Parameter(torch.ones(2)) for _ in "ab"], adamw(lr=0.1)).state_dict()
    before = repr(optimizer.state_dict())
    with pytest.raises(ValueError, match="numbers 0 and 1 for .* which are one parameter"):
        optimizer.load_state_dict(saved)
    assert repr(optimizer.state_dict()) == before


def test_lbfgs_refuses_a_checkpoint_whose_loading_would_lose_state() -> None:
    params = list(params_of().values())
    optimizer = TorchOptimizer(params, lbfgs())
    optimizer.step(lambda: sum((one**2).sum() for one in params))
    before = copy.deepcopy(optimizer.state_dict())
    for change, told in LOSING.values():
        saved = copy.deepcopy(before)
        saved["state"][3] = {}
        change(saved)
        with pytest.raises(ValueError, match=told):
            optimizer.load_state_dict(saved)
        assert repr(optimizer.state_dict()) == repr(before)
