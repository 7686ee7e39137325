"""to_torch_state_dict: which parameters are one group, and which options it can have."""

from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from functional_optim import adam, adamw, sgd, to_torch_state_dict

from .support import noise


class Pair(NamedTuple):
    """A tree of which optree knows by itself."""

    second: Any
    first: Any


def numbers(tree: Any) -> list[list[int]]:
    optimizer = sgd(0.1)
    written = to_torch_state_dict(optimizer, tree, optimizer.init(tree))
    return [group["params"] for group in written["param_groups"]]


def one() -> torch.Tensor:
    return torch.ones(2)


def test_a_tuple_or_a_list_of_dicts_is_one_group_each() -> None:
    assert numbers(({"b": one(), "a": one()}, {"c": one()})) == [[0, 1], [2]]
    assert numbers([{"b": one()}, {}, {"c": one()}]) == [[0], [], [1]]


@pytest.mark.parametrize(
    "tree",
    [
        [one(), one()],
        (one(), one()),
        {"z": one(), "a": one()},
        {"z": {"y": one()}, "a": {"b": one()}},
        ({"z": one()}, one()),
        Pair(one(), one()),
        OrderedDict(z=one(), a=one()),
    ],
)
def test_any_other_tree_is_one_group(tree: Any) -> None:
    assert numbers(tree) == [[0, 1]]


def test_a_lone_tensor_is_one_group() -> None:
    assert numbers(one()) == [[0]]


def test_nothing_is_numbered_for_none() -> None:
    assert numbers({"z": one(), "m": None, "a": one()}) == [[0, 1]]


@pytest.mark.parametrize("nested", [False, True])
def test_numbers_follow_insertion_through_every_dict(nested: bool) -> None:
    params: dict[str, Any] = {"z": noise(0, 1), "10": noise(1, 2), "9": noise(2, 3)}
    if nested:
        params = {"y": params, "b": {"q": noise(3, 4), "c": noise(4, 5)}}
    optimizer = adamw(0.1)
    written = to_torch_state_dict(optimizer, params, optimizer.init(params))
    sizes = [written["state"][i]["exp_avg"].numel() for i in range(len(written["state"]))]
    assert sizes == list(range(1, len(sizes) + 1))


def test_groups_have_the_options_that_hold_for_them() -> None:
    params = ({"z": noise(0, 2), "a": noise(1, 3)}, {"b": noise(2, 4)})
    optimizer = adamw(0.1, weight_decay=0.5).override((1,), weight_decay=0.0, lr=0.2)
    state = optimizer.init(params)
    grads = tuple(
        {k: noise(i, *v.shape) for k, v in group.items()} for i, group in enumerate(params)
    )
    params, state = optimizer.update(params, grads, state)
    leaves = [torch.nn.Parameter(leaf.clone()) for group in params for leaf in group.values()]
    live = torch.optim.AdamW([{"params": leaves[:2]}, {"params": leaves[2:]}], foreach=False)
    live.load_state_dict(to_torch_state_dict(optimizer, params, state))
    assert [g["lr"] for g in live.param_groups] == [0.1, 0.2]
    assert [g["weight_decay"] for g in live.param_groups] == [0.5, 0.0]
    for _ in range(3):
        flat = [grad for group in grads for grad in group.values()]
        for leaf, grad in zip(leaves, flat, strict=True):
            leaf.grad = grad.clone()
        params, state = optimizer.update(params, grads, state)
        live.step()
    stepped = [leaf for group in params for leaf in group.values()]
    assert all(torch.equal(a, b) for a, b in zip(stepped, leaves, strict=True))


def test_options_that_differ_inside_a_group_are_refused() -> None:
    params = {"weight": one(), "bias": one()}
    optimizer = adamw(0.1).override(lambda path: path[-1] == "bias", weight_decay=0.0)
    with pytest.raises(ValueError, match="differ inside one group"):
        to_torch_state_dict(optimizer, params, optimizer.init(params))


def test_overrides_that_come_to_the_same_are_no_difference() -> None:
    params = {"weight": one(), "bias": one()}
    optimizer = adamw(0.1).override(("bias",), lr=0.1)
    written = to_torch_state_dict(optimizer, params, optimizer.init(params))
    assert written["param_groups"][0]["lr"] == 0.1


def test_a_tensor_given_to_both_is_no_difference() -> None:
    params = {"weight": one(), "bias": one()}
    optimizer = adamw(torch.tensor([0.1])).override(lambda path: True, eps=torch.tensor([1e-3]))
    written = to_torch_state_dict(optimizer, params, optimizer.init(params))
    assert float(written["param_groups"][0]["eps"]) == pytest.approx(1e-3)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_before_its_first_step_has_no_entries(momentum: float) -> None:
    params = {"z": one(), "a": one()}
    optimizer = sgd(0.1, momentum=momentum, dampening=0.5)
    state = optimizer.init(params)
    assert to_torch_state_dict(optimizer, params, state)["state"] == {}
    params, state = optimizer.update(params, {"z": None, "a": one()}, state)
    entries = to_torch_state_dict(optimizer, params, state)["state"]
    assert list(entries) == ([1] if momentum else [])
    assert all(list(entry) == ["momentum_buffer"] for entry in entries.values())


def test_a_state_of_another_tree_is_refused() -> None:
    optimizer = adamw(0.1)
    params = {"w": one()}
    with pytest.raises(ValueError, match="state"):
        to_torch_state_dict(optimizer, params, optimizer.init({"w": one(), "b": one()}))
    with pytest.raises(ValueError, match="state"):
        to_torch_state_dict(optimizer, params, sgd(momentum=0.9).init(params))
    with pytest.raises(TypeError, match="State"):
        to_torch_state_dict(optimizer, params, {})


def test_a_namespace_of_one_s_own() -> None:
    optimizer = adamw(0.1).using(namespace="mine")
    params = {"z": noise(0, 1), "a": noise(1, 2)}
    written = to_torch_state_dict(optimizer, params, optimizer.init(params))
    assert [written["state"][i]["exp_avg"].numel() for i in range(2)] == [1, 2]


@pytest.mark.parametrize("hyper", [{"lr": lambda step: 0.1}, {"betas": (0.9, lambda step: 0.9)}])
def test_schedules_are_refused(hyper: dict[str, Any]) -> None:
    optimizer = adam(**hyper)
    params = {"w": torch.ones(2)}
    with pytest.raises(ValueError, match="schedule"):
        to_torch_state_dict(optimizer, params, optimizer.init(params))


def test_a_tensor_lr_stays_one(tmp_path: Path) -> None:
    optimizer = adam(torch.tensor(0.25))
    params = {"w": torch.ones(2)}
    written = to_torch_state_dict(optimizer, params, optimizer.init(params))
    torch.save(written, tmp_path / "checkpoint.pt")
    live = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))])
    live.load_state_dict(torch.load(tmp_path / "checkpoint.pt"))
    assert torch.equal(live.param_groups[0]["lr"], torch.tensor(0.25))
