"""Options of parameter groups: misspelt options are refused, and torch's entries are accepted."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from functional_optim import (
    DistributedOptimizer,
    TorchOptimizer,
    adam,
    adamw,
    chain,
    clip_by_global_norm,
    ema,
    freeze,
    partition,
    sgd,
    sign_sgd,
)
from functional_optim.frontends.local_optimizer import local_optimizer
from sharding import ZeroRedundancyOptimizer
from sharding.transport.local import LocalWorld
from sharding.transport.local_group import LocalGroup
from tests.choices import case


def label_of(path: tuple[Any, ...], shape: tuple[int, ...]) -> str:
    return "matrices" if len(shape) == 2 else "rest"


PARTS = partition({"matrices": sgd(0.1), "rest": adamw(0.1)}, label_of)
DOORS: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "torch": lambda groups: TorchOptimizer(groups, adamw()),
    "override": lambda groups: TorchOptimizer(groups, adamw().override((1,), lr=0.5)),
    "parts": lambda groups: TorchOptimizer(groups, PARTS),
    "local": lambda groups: local_optimizer(adamw(), groups),
    "local class": lambda groups: local_optimizer(torch.optim.AdamW, groups),
    "local parts": lambda groups: local_optimizer(PARTS, groups),
    "added": lambda groups: added(groups, adamw()),
    "added to parts": lambda groups: added(groups, PARTS),
}


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(3))


def added(groups: list[dict[str, Any]], optimizer: Any) -> Any:
    made = TorchOptimizer(list(pair()), optimizer)
    for group in groups:
        made.add_param_group(group)
    return made


@pytest.mark.parametrize("door", DOORS)
def test_a_misspelt_option_of_a_group_is_refused(door: str) -> None:
    """Fault 30: the error names the nearest option."""
    for wrong, near in (("wd", "weight_decay"), ("beta", "betas"), ("learning_rate", "lr")):
        first, second = pair()
        with (
            case(wrong=wrong),
            pytest.raises(TypeError, match=f"option '{wrong}'.*did you mean '{near}'"),
        ):
            DOORS[door]([{"params": [second, first], wrong: 0.1}])


@pytest.mark.parametrize("door", DOORS)
def test_the_options_and_entries_of_torch_are_taken(door: str) -> None:
    """Fault 30: groups may hold entries that torch's classes and schedulers write, and a name."""
    first, second = pair()
    entries = {"name": "all", "initial_lr": 0.1, "swa_lr": 0.1, "foreach": None, "fused": False}
    DOORS[door]([{"params": [first, second], "lr": 0.1, "weight_decay": 0.5, **entries}])


def test_groups_of_other_optimizers_are_taken() -> None:
    """Fault 30: groups of torch's class, and of our composed optimizers, are accepted."""
    params = list(pair())
    theirs = torch.optim.AdamW(params, lr=0.5)
    torch.optim.lr_scheduler.OneCycleLR(theirs, 0.1, total_steps=10)
    assert TorchOptimizer(theirs.param_groups, adamw()).param_groups[0]["betas"] == (0.95, 0.999)
    own = TorchOptimizer(params, chain(clip_by_global_norm(1.0), adamw(0.5), ema(0.9)))
    assert TorchOptimizer(own.param_groups, own.chain).param_groups[0]["lr"] == 0.5
    parts = TorchOptimizer(params, partition({"matrices": sgd(), "rest": freeze()}, label_of))
    assert len(TorchOptimizer(parts.param_groups, parts.chain).param_groups) == 2


def test_an_option_that_stands_in_several_stages_is_said_to() -> None:
    """Fault 30: an option of several stages still gets the error about several stages."""
    optimizer = chain(adamw(), sgd(weight_decay=0.5))
    with pytest.raises(ValueError, match="several stages"):
        TorchOptimizer([{"params": list(pair()), "weight_decay": 0.5}], optimizer)


def test_distributed_optimizers_refuse_before_a_worker_is_asked() -> None:
    """Fault 30: one chain, parts, and a class of torch refuse it before they call a worker."""
    kinds: list[Any] = [adamw, torch.optim.AdamW, lambda: PARTS]
    for kind in kinds:
        groups = [{"params": list(zip("ab", pair(), strict=True)), "wd": 0.1}]
        with case(kind=kind), pytest.raises(TypeError, match="did you mean 'weight_decay'"):
            DistributedOptimizer.over_threads(kind, groups, {"a": "one", "b": "two"})


@pytest.mark.parametrize("door", DOORS)
def test_another_kind_of_weight_decay_than_that_of_the_chain_is_refused(door: str) -> None:
    """torch's classes read ``decoupled_weight_decay`` in each group; here, the chain decides it."""
    own = {"weight_decay": 0.5, "decoupled_weight_decay": False}
    if door == "local class":  # torch's AdamW has the option, and its constructor refuses False
        with pytest.raises(ValueError, match="decoupled_weight_decay"):
            DOORS[door]([{"params": list(pair()), **own}])
        return
    with pytest.raises(ValueError, match="decoupled_weight_decay=False, but the chain decides"):
        DOORS[door]([{"params": list(pair()), **own}])
    DOORS[door]([{"params": list(pair()), **own, "weight_decay": 0.0}])  # it has no effect


@pytest.mark.parametrize("front_end", ["torch", "local"])
def test_another_kind_of_weight_decay_between_steps_is_refused(front_end: str) -> None:
    """The error comes before a parameter is changed, and steps go on without the option."""
    params = [torch.nn.Parameter(torch.ones(2))]
    chosen = adam(0.1, weight_decay=0.5)
    optimizer: Any = TorchOptimizer(params, chosen)
    step = optimizer.step
    if front_end != "torch":
        optimizer = local_optimizer(chosen, params)
        step = optimizer.step_by
    optimizer.param_groups[0]["decoupled_weight_decay"] = True
    params[0].grad = torch.ones(2)
    given = [] if front_end == "torch" else [[params[0].grad]]
    with pytest.raises(ValueError, match="decoupled_weight_decay=True, but the chain decides"):
        step(*given)
    assert params[0].tolist() == [1.0, 1.0]
    optimizer.param_groups[0]["decoupled_weight_decay"] = False
    step(*given)
    assert params[0].tolist() != [1.0, 1.0]


@pytest.mark.parametrize("decoupled", [False, True])
def test_the_error_for_another_weight_decay_says_how_to_load(decoupled: bool) -> None:
    """It named no way out. Each of the two ways that it names now loads the state."""
    theirs, ours = (
        TorchOptimizer(pair(), adamw(weight_decay=0.1) if one else adam(weight_decay=0.1))
        for one in (decoupled, not decoupled)
    )
    saved = copy.deepcopy(theirs.state_dict())
    for group in saved["param_groups"]:
        group["decoupled_weight_decay"] = decoupled
    before = repr(ours.state_dict())
    told = f"such as {'adamw' if decoupled else 'adam'} .*; or remove 'decoupled_weight_decay'"
    with pytest.raises(ValueError, match=told):
        ours.load_state_dict(saved)
    assert repr(ours.state_dict()) == before
    theirs.load_state_dict(saved)
    for group in saved["param_groups"]:
        del group["decoupled_weight_decay"]
    ours.load_state_dict(saved)


def test_sharded_optimizers_refuse_another_kind_of_weight_decay() -> None:
    """The group of a torch class has the option, and that of a chain has not."""

    def run(group: LocalGroup) -> list[float]:
        param = torch.nn.Parameter(torch.ones(2))
        own = [{"params": [param], "weight_decay": 0.5, "decoupled_weight_decay": True}]
        with pytest.raises(ValueError, match="decoupled_weight_decay=True, but the chain decides"):
            ZeroRedundancyOptimizer(own, adam(0.1), group)
        zero = ZeroRedundancyOptimizer(own, torch.optim.Adam, group, lr=0.1)
        param.grad = torch.ones(2)
        zero.step()
        return param.tolist()

    theirs = torch.nn.Parameter(torch.ones(2))
    theirs.grad = torch.ones(2)
    torch.optim.AdamW([theirs], lr=0.1, weight_decay=0.5, foreach=False).step()
    assert LocalWorld(1).run(run) == [theirs.tolist()]


def two_chains() -> TorchOptimizer:
    """Return an optimizer with a chain for each of two groups, after a step."""
    first, second = pair()
    parts = partition({"matrices": sign_sgd(0.25), "rest": sgd(0.5)}, label_of)
    optimizer = TorchOptimizer([first, second], parts)
    first.grad, second.grad = torch.ones(2, 2), torch.ones(3)
    optimizer.step()
    return optimizer


def remove_first(groups: list[Any]) -> None:
    del groups[0]


def add_a_copy(groups: list[Any]) -> None:
    groups.append({**groups[0], "params": [torch.nn.Parameter(torch.ones(2))]})


@pytest.mark.parametrize("change", [remove_first, add_a_copy, list.reverse, list.clear])
@pytest.mark.parametrize("copied", [False, True])
def test_groups_with_their_own_chains_stay_in_their_places(
    change: Callable[[list[Any]], None], copied: bool
) -> None:
    """Before, a group that moved to the place of another one was stepped by the other chain."""
    optimizer = two_chains()
    if copied:
        optimizer = copy.deepcopy(optimizer)
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.param_groups[0] = {**optimizer.param_groups[0]}  # the same place
    params = [group["params"][0] for group in optimizer.param_groups]
    for param in params:
        param.grad = torch.ones_like(param)
    before, groups = [param.tolist() for param in params], list(optimizer.param_groups)
    change(optimizer.param_groups)
    with pytest.raises(ValueError, match="chain of its own at its place; put them back"):
        optimizer.step()
    with pytest.raises(ValueError, match="put them back"):
        optimizer.state_dict()
    assert [param.tolist() for param in params] == before
    optimizer.param_groups[:] = groups
    optimizer.step()
    assert params[1].tolist() == [0.0, 0.0, 0.0]


def test_groups_with_one_chain_may_be_removed_and_not_added_by_hand() -> None:
    first, second = pair()
    optimizer = TorchOptimizer([{"params": first}, {"params": second, "lr": 0.25}], sgd(0.5))
    first.grad, second.grad = torch.ones(2, 2), torch.ones(3)
    optimizer.param_groups.reverse()
    optimizer.step()
    assert (first[0, 0].item(), second[0].item()) == (0.5, 0.75)
    del optimizer.param_groups[1]
    optimizer.step()
    assert (first[0, 0].item(), second[0].item()) == (0.5, 0.5)
    add_a_copy(optimizer.param_groups)
    optimizer.step()  # as many groups as before
    add_a_copy(optimizer.param_groups)
    with pytest.raises(ValueError, match="has 3 groups, and 2 were made .* add_param_group"):
        optimizer.step()


@pytest.mark.parametrize("kind", [sgd, torch.optim.SGD])
def test_workers_refuse_groups_that_are_changed_by_hand(kind: Any) -> None:
    """Before, a change had no effect, and reversed groups had each other's options."""
    params = pair()
    groups = [{"params": [("a", params[0])]}, {"params": [("b", params[1])], "lr": 0.25}]
    optimizer = DistributedOptimizer.over_threads(kind, groups, {"a": "one", "b": "two"}, lr=0.5)
    gradients = {"a": torch.ones(2, 2), "b": torch.ones(3)}
    optimizer.step(gradients)
    before = list(optimizer.param_groups)
    changes: list[tuple[Callable[[list[Any]], Any], str]] = [
        (list.reverse, r"'a' was in param_groups\[0\] .* in param_groups\[1\] now"),
        (remove_first, r"'a' was in param_groups\[0\] .* in no group now"),
        (add_a_copy, r"a new parameter was in no group .* in param_groups\[2\] now"),
    ]
    for change, told in changes:
        change(optimizer.param_groups)
        with case(told=told), pytest.raises(ValueError, match=f"{told}.*put 'params' back"):
            optimizer.step(gradients)
        optimizer.param_groups[:] = before
    assert (params[0][0, 0].item(), params[1][0].item()) == (0.5, 0.75)
    optimizer.step(gradients)
    assert (params[0][0, 0].item(), params[1][0].item()) == (0.0, 0.5)
