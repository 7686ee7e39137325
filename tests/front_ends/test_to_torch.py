"""to_torch_state_dict: indices, groups and options of a tree, and calls that it refuses.

The tests in test_runs_go_on.py check that torch's classes continue from the state dict, for all
classes and histories.
"""

from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from functional_optim import (
    Optimizer,
    TorchOptimizer,
    adam,
    adamw,
    chain,
    clip_by_value,
    lion,
    qhm,
    register_functional_optim,
    sgd,
    stored,
    to_torch_state_dict,
)
from tests.choices import each

from .support import assert_same_tensors, noise, run, set_grads


def one() -> torch.Tensor:
    return torch.ones(2)


def written(optimizer: Optimizer, tree: Any, *rest: Any, **options: Any) -> dict[str, Any]:
    """Return the state dict of parameters without steps."""
    return to_torch_state_dict(optimizer, tree, optimizer.init(tree), *rest, **options)


class Pair(NamedTuple):
    """Tree that optree knows without registration."""

    second: Any
    first: Any


@each(
    given=[
        (({"b": one(), "a": one()}, {"c": one()}), [[0, 1], [2]]),
        ([{"b": one()}, {}, {"c": one()}], [[0], [], [1]]),
        ([one(), one()], [[0, 1]]),
        ((one(), one()), [[0, 1]]),
        ({"z": one(), "a": one()}, [[0, 1]]),
        ({"z": {"y": one()}, "a": {"b": one()}}, [[0, 1]]),
        (({"z": one()}, one()), [[0, 1]]),
        (Pair(one(), one()), [[0, 1]]),
        (OrderedDict(z=one(), a=one()), [[0, 1]]),
        (one(), [[0]]),
        ({"z": one(), "m": None, "a": one()}, [[0, 1]]),
    ]
)
def test_a_tuple_or_a_list_of_dicts_is_one_group_each_any_other_tree_is_one(given: Any) -> None:
    tree, numbers = given
    assert [group["params"] for group in written(sgd(0.1), tree)["param_groups"]] == numbers


@each(nested=[False, True], namespace=["", "mine"])
def test_numbers_follow_insertion_through_every_dict(nested: bool, namespace: str) -> None:
    params: dict[str, Any] = {"z": noise(0, 1), "10": noise(1, 2), "9": noise(2, 3)}
    if nested:
        params = {"y": params, "b": {"q": noise(3, 4), "c": noise(4, 5)}}
    state = written(adamw(0.1).using(namespace=namespace), params)["state"]
    sizes = [state[i]["exp_avg"].numel() for i in range(len(state))]
    assert sizes == list(range(1, len(sizes) + 1))


def test_named_parameters_of_a_model_have_the_order_of_its_parameters() -> None:
    model = torch.nn.ModuleDict({"z": torch.nn.Linear(2, 3), "a": torch.nn.Linear(3, 1)})
    params = {name: p.detach() for name, p in model.named_parameters()}
    assert list(params) != sorted(params)
    optimizer = adam(0.1)
    grads = {name: torch.ones_like(p) for name, p in params.items()}
    _, state = optimizer.update(params, grads, optimizer.init(params))
    live = torch.optim.Adam(model.parameters())
    live.load_state_dict(to_torch_state_dict(optimizer, params, state))
    for name, param in model.named_parameters():
        assert torch.equal(live.state[param]["exp_avg"], state.leaves[name].stages[-1].exp_avg)


def test_its_tensors_are_those_of_the_state_and_nothing_is_changed() -> None:
    optimizer, params = adam(0.1), {"w": noise(0, 3), "b": noise(1, 2)}
    params, state = optimizer.update(params, {"w": noise(2, 3), "b": None}, optimizer.init(params))
    before = state.leaves["w"].stages[-1].exp_avg.clone()
    found = to_torch_state_dict(optimizer, params, state)["state"]
    for number, name in enumerate(params):
        assert found[number]["exp_avg"] is state.leaves[name].stages[-1].exp_avg
    assert torch.equal(before, state.leaves["w"].stages[-1].exp_avg)
    assert {leaf.step.dtype for leaf in state.leaves.values()} == {torch.int64}


def test_groups_have_the_options_that_hold_for_them() -> None:
    params = ({"z": noise(0, 2), "a": noise(1, 3)}, {"b": noise(2, 4)})
    optimizer = adamw(0.1, weight_decay=0.5).override((1,), weight_decay=0.0, lr=0.2)
    state = optimizer.init(params)
    leaves = [torch.nn.Parameter(leaf.clone()) for group in params for leaf in group.values()]
    live = torch.optim.AdamW([{"params": leaves[:2]}, {"params": leaves[2:]}], foreach=False)
    for seed in range(3):
        if seed == 1:
            live.load_state_dict(to_torch_state_dict(optimizer, params, state))
            assert [g["lr"] for g in live.param_groups] == [0.1, 0.2]
            assert [g["weight_decay"] for g in live.param_groups] == [0.5, 0.0]
        set_grads(leaves, seed)
        grads = ({"z": leaves[0].grad, "a": leaves[1].grad}, {"b": leaves[2].grad})
        params, state = optimizer.update(params, grads, state)
        if seed == 0:
            with torch.no_grad():
                for leaf, value in zip(leaves, (*params[0].values(), params[1]["b"]), strict=True):
                    leaf.copy_(value)
        else:
            live.step()
    assert_same_tensors([*params[0].values(), params[1]["b"]], leaves)


def test_options_that_differ_inside_a_group_are_refused_and_those_that_do_not_are_not() -> None:
    params = {"weight": one(), "bias": one()}
    with pytest.raises(ValueError, match="differ inside one group"):
        written(adamw(0.1).override(("bias",), weight_decay=0.0), params)
    alike = written(adamw(0.1).override(("bias",), lr=0.1), params)
    assert alike["param_groups"][0]["lr"] == 0.1
    tensors = adamw(torch.tensor([0.1])).override(lambda path: True, eps=torch.tensor([1e-3]))
    eps = written(tensors, params)["param_groups"][0]["eps"]
    assert float(eps) == pytest.approx(1e-3)


@each(momentum=[0.0, 0.9])
def test_sgd_before_its_first_step_has_no_entries(momentum: float) -> None:
    params = {"z": one(), "a": one()}
    optimizer = sgd(0.1, momentum=momentum, dampening=0.5)
    assert written(optimizer, params)["state"] == {}
    params, state = optimizer.update(params, {"z": None, "a": one()}, optimizer.init(params))
    entries = to_torch_state_dict(optimizer, params, state)["state"]
    assert list(entries) == ([1] if momentum else [])
    assert all(list(entry) == ["momentum_buffer"] for entry in entries.values())


def test_a_state_of_another_tree_is_refused() -> None:
    optimizer, params = adamw(0.1), {"w": one()}
    with pytest.raises(ValueError, match="state"):
        to_torch_state_dict(optimizer, params, optimizer.init({"w": one(), "b": one()}))
    with pytest.raises(ValueError, match="state"):
        to_torch_state_dict(optimizer, params, sgd(momentum=0.9).init(params))
    with pytest.raises(TypeError, match="State"):
        to_torch_state_dict(optimizer, params, {})


@each(hyper=[{"lr": lambda step: 0.1}, {"betas": (0.9, lambda step: 0.9)}])
def test_schedules_are_refused(hyper: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="schedule"):
        written(adam(**hyper), {"w": one()})


def test_a_tensor_lr_stays_one(tmp_path: Path) -> None:
    torch.save(written(adam(torch.tensor(0.25)), {"w": one()}), tmp_path / "checkpoint.pt")
    live = torch.optim.Adam([torch.nn.Parameter(one())])
    live.load_state_dict(torch.load(tmp_path / "checkpoint.pt"))
    assert torch.equal(live.param_groups[0]["lr"], torch.tensor(0.25))


def test_a_user_s_step_hooks_see_no_step_that_the_user_did_not_make() -> None:
    seen: list[Any] = []
    handles = [
        register_optimizer_step_pre_hook(lambda optimizer, *_: seen.append(optimizer)),
        register_optimizer_step_post_hook(lambda optimizer, *_: seen.append(optimizer)),
    ]
    try:
        written(adam(0.1), {"w": one()})
    finally:
        for handle in handles:
            handle.remove()
    assert seen == []


@each(optimizer=[lion(0.1), qhm(0.1), chain(clip_by_value(1.0), adam(0.1))])
def test_a_chain_that_torch_does_not_know_is_refused(optimizer: Optimizer) -> None:
    """The search for a class skips a registered factory that needs arguments."""

    def needs_lr(lr: float) -> Optimizer:
        return sgd(lr)

    class NeedsLr(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, {"lr": lr})

    register_functional_optim(NeedsLr, needs_lr)
    with pytest.raises(ValueError, match="class"):
        written(optimizer, {"w": one()})


def test_a_chain_that_torch_does_not_know_for_a_class_of_one_s_own() -> None:
    class Clipped(TorchOptimizer):
        def __init__(self, params: Any, clip_value: float = 1.0, lr: float = 0.1) -> None:
            super().__init__(params, chain(clip_by_value(clip_value), adam(lr)))

    optimizer = chain(clip_by_value(0.25), adam(0.3))
    params = {"w": one()}
    params, state = optimizer.update(params, {"w": one()}, optimizer.init(params))
    live = Clipped([torch.nn.Parameter(params["w"].clone())])
    live.load_state_dict(to_torch_state_dict(optimizer, params, state, Clipped))
    assert live.param_groups[0]["clip_value"] == 0.25
    run(live, 7)
    (param,) = live.param_groups[0]["params"]
    params, _ = optimizer.update(params, {"w": param.grad}, state)
    assert_same_tensors([params["w"]], [param])


class Renamed(torch.optim.Optimizer):
    """SGD whose options have names of its own."""

    def __init__(self, params: Any, rate: float = 0.1, friction: float = 0.1) -> None:
        super().__init__(params, {"rate": rate, "friction": friction})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                buffer = self.state[param].get("momentum_buffer", torch.zeros_like(param))
                buffer = buffer * (1 - group["friction"]) + param.grad
                self.state[param]["momentum_buffer"] = buffer
                param.add_(buffer, alpha=-group["rate"])


def test_options_with_other_names_are_written_if_they_give_this_chain() -> None:
    register_functional_optim(
        Renamed, lambda rate=0.1, friction=0.1: sgd(rate, momentum=1 - friction)
    )
    optimizer, params = sgd(0.3, momentum=0.5), {"w": one()}
    params, state = optimizer.update(params, {"w": one()}, optimizer.init(params))
    given = {"rate": 0.3, "friction": 0.5}
    live = Renamed([torch.nn.Parameter(params["w"].clone())])
    live.load_state_dict(to_torch_state_dict(optimizer, params, state, Renamed, options=given))
    run(live, 7)
    (param,) = live.param_groups[0]["params"]
    params, _ = optimizer.update(params, {"w": param.grad}, state)
    assert_same_tensors([params["w"]], [param])
    for wrong in ({**given, "rate": 0.1}, {"rate": 0.3}):
        with pytest.raises(ValueError, match=r"no lr, .*momentum"):
            to_torch_state_dict(optimizer, params, state, Renamed, options=wrong)


@pytest.mark.parametrize("decoupled", [False, True])
def test_a_stored_chain_says_as_the_plain_one_how_weight_decays(decoupled: bool) -> None:
    plain = adam(weight_decay=0.1, decoupled_weight_decay=decoupled)
    kept = stored(plain, state="bfloat16")
    saved = written(kept, [one()], cls=torch.optim.Adam)
    assert saved["param_groups"][0]["decoupled_weight_decay"] is decoupled
    TorchOptimizer([one()], kept).load_state_dict(saved)
