"""State of a step hook, moved to TorchOptimizer and torch.optim and back, bit for bit."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from functional_optim import (
    Optimizer,
    TorchOptimizer,
    adam_mini,
    adamw,
    came,
    chain,
    clip_by_global_norm,
    dadapt_adam,
    dadapt_sgd,
    dog,
    ldog,
    lion,
    novograd,
    prodigy,
    sgd,
    signum,
    stored,
)
from hooks import OptimizerState, step_hook
from tests.choices import case

from .support import assert_same, loss, model

pytestmark = pytest.mark.usefixtures("world_of_one")

CHAINS: dict[str, Callable[[], Optimizer]] = {
    "adamw": lambda: adamw(lr=0.1),
    "sgd with momentum": lambda: sgd(lr=0.1, momentum=0.9),
    "no state": lambda: sgd(lr=0.1),
    "signum": lambda: signum(lr=0.1),
    "novograd": lambda: novograd(lr=0.1),
    "came": lambda: came(lr=0.1),
    "adam_mini": lambda: adam_mini(lr=0.1),
    "ldog": lambda: ldog(lr=0.1, reps_rel=0.1),
    "a chain": lambda: chain(clip_by_global_norm(0.5), lion(lr=0.01)),
    "a schedule": lambda: sgd(lr=_halved, momentum=0.5),
    "8-bit state": lambda: stored(adamw(lr=0.1), state="int8"),
    # These find their step size from sums over all parameters.
    "prodigy": lambda: chain(clip_by_global_norm(0.5), prodigy()),
    "dadapt_adam": lambda: chain(clip_by_global_norm(0.5), dadapt_adam(d0=0.1)),
    "dadapt_sgd": lambda: chain(clip_by_global_norm(0.5), dadapt_sgd(d0=0.1, momentum=0.5)),
    "dog": lambda: chain(clip_by_global_norm(0.5), dog(reps_rel=0.1)),
}


def _halved(made: Any) -> Any:
    return 0.1 * 0.5**made


def hooked(optimizer: Optimizer) -> tuple[DistributedDataParallel, OptimizerState]:
    ddp = DistributedDataParallel(model())
    return ddp, step_hook(ddp, optimizer)


def plain_steps(module: nn.Module, plain: torch.optim.Optimizer, iterations: range) -> None:
    for iteration in iterations:
        plain.zero_grad()
        loss(module, iteration).backward()
        plain.step()


def hook_steps(ddp: nn.Module, iterations: range) -> None:
    for iteration in iterations:
        ddp.zero_grad()
        loss(ddp, iteration).backward()


def assert_equal(one: Any, other: Any) -> None:
    """Assert that two state dicts are equal bit for bit."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, list):
        for pair in zip(one, other, strict=True):
            assert_equal(*pair)
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    else:
        assert one == other


def test_to_torch_optimizer_and_back() -> None:
    for name, make in CHAINS.items():
        with case(chain=name):
            ddp, state = hooked(make())
            hook_steps(ddp, range(2))
            twin = copy.deepcopy(ddp.module)
            plain = TorchOptimizer(twin.named_parameters(), make().replace(lr=9.0))
            saved = state.state_dict()
            plain.load_state_dict(saved)
            assert_equal(plain.state_dict(), saved)
            plain_steps(twin, plain, range(2, 4))
            hook_steps(ddp, range(2, 4))
            assert_same(ddp.module, twin)
            back, other = hooked(make().replace(lr=9.0))
            back.module.load_state_dict(twin.state_dict())
            written = plain.state_dict()
            other.load_state_dict(written)
            assert_equal(other.state_dict(), written)
            hook_steps(back, range(4, 6))
            plain_steps(twin, plain, range(4, 6))
            assert_same(back.module, twin)


def test_to_torch_optim_and_back() -> None:
    ddp, state = hooked(adamw(lr=0.1))
    hook_steps(ddp, range(2))
    twin = copy.deepcopy(ddp.module)
    plain = torch.optim.AdamW(twin.parameters(), foreach=False)
    plain.load_state_dict(state.state_dict())
    assert plain.param_groups[0]["lr"] == 0.1
    plain.param_groups[0]["lr"] = state.param_groups[0]["lr"] = 0.05
    plain_steps(twin, plain, range(2, 4))
    hook_steps(ddp, range(2, 4))
    assert_same(ddp.module, twin)
    back, other = hooked(adamw())
    back.module.load_state_dict(twin.state_dict())
    other.load_state_dict(plain.state_dict())
    assert "foreach" in other.param_groups[0]  # torch's own options are kept
    hook_steps(back, range(4, 6))
    plain_steps(twin, plain, range(4, 6))
    assert_same(back.module, twin)


def _is_bias(path: Any) -> bool:
    return bool(path[-1].endswith("bias"))


def test_groups_are_those_of_overrides() -> None:
    """Groups can be changed one by one, and move to groups of TorchOptimizer and back."""
    made = adamw(lr=0.1, weight_decay=0.5).override(_is_bias, weight_decay=0.0)
    ddp, state = hooked(made)
    twin = copy.deepcopy(ddp.module)
    pairs = list(twin.named_parameters())
    split = [[(n, p) for n, p in pairs if n.endswith("bias") is bias] for bias in (False, True)]
    plain = TorchOptimizer(
        [{"params": split[0]}, {"params": split[1], "weight_decay": 0.0}],
        adamw(lr=0.1, weight_decay=0.5),
    )
    hook_steps(ddp, range(1))
    plain_steps(twin, plain, range(1))
    assert [one["param_names"] for one in state.param_groups] == [
        [name for name, _ in one] for one in split
    ]
    for groups in (state.param_groups, plain.param_groups):
        groups[1]["lr"] = 0.2
        groups[0]["weight_decay"] = 0.25
    hook_steps(ddp, range(1, 2))
    plain_steps(twin, plain, range(1, 2))
    assert_same(ddp.module, twin)
    back, other = hooked(made)
    back.module.load_state_dict(twin.state_dict())
    other.load_state_dict(state.state_dict())
    assert_equal(other.state_dict(), plain.state_dict())
    assert [one["lr"] for one in other.param_groups] == [0.1, 0.2]
    hook_steps(back, range(2, 3))
    plain_steps(twin, plain, range(2, 3))
    assert_same(back.module, twin)
    other.param_groups[1]["weight_decay"] = 0.75
    other.set_hyper(weight_decay=0.125, lr=0.4)  # an override sets the second group's weight decay
    assert [one["weight_decay"] for one in other.param_groups] == [0.125, 0.75]
    assert [one["lr"] for one in other.param_groups] == [0.4, 0.4]


def test_what_is_loaded_shares_no_memory_and_replaces_what_was_planned() -> None:
    ddp, state = hooked(adamw(lr=0.1))
    hook_steps(ddp, range(3))
    saved, there = state.state_dict(), copy.deepcopy(ddp.module)
    kept = copy.deepcopy(saved)
    hook_steps(ddp, range(3, 5))
    want = copy.deepcopy(ddp.module)
    assert_equal(saved, kept)
    state.load_state_dict(saved)
    ddp.module.load_state_dict(there.state_dict())
    hook_steps(ddp, range(3, 5))
    assert_same(ddp.module, want)
    assert_equal(saved, kept)


def test_a_state_dict_that_is_refused_changes_nothing() -> None:
    ddp, state = hooked(adamw(lr=0.1))
    hook_steps(ddp, range(1))
    before = state.state_dict()
    half = copy.deepcopy(before)
    half["state"][0].pop("exp_avg")
    moved = copy.deepcopy(before)
    moved["state"][2]["exp_avg"] = torch.zeros(7)
    wide = copy.deepcopy(before)
    wide["param_groups"][0]["lr"] = -1.0
    odd: Any = {"state": {}, "param_groups": []}
    for name, given, text in (
        ("half", half, "does not fit this optimizer"),
        ("moved", moved, "exp_avg"),
        ("wide", wide, "lr must be .* got -1.0"),
        ("no groups", odd, "parameter group"),
    ):
        with case(refused=name), pytest.raises(ValueError, match=text):
            state.load_state_dict(given)
        assert_equal(state.state_dict(), before)


def test_an_option_that_is_refused_is_named_before_anything_is_stepped() -> None:
    for name, value, text in (
        ("lr", -1.0, "ValueError: .*lr must be .* got -1.0"),
        ("amsgrad", True, "ValueError: .*max_exp_avg_sq"),
        ("betas", 0.9, "TypeError: .*betas"),
    ):
        ddp, state = hooked(adamw(lr=0.1))
        hook_steps(ddp, range(2))
        there, before = copy.deepcopy(ddp.module), state.state_dict()
        group = state.param_groups[0]
        kept, group[name] = group[name], value
        with case(refused=name), pytest.raises(RuntimeError, match=text):
            hook_steps(ddp, range(1))
        group[name] = kept
        assert_same(ddp.module, there)
        assert_equal(state.state_dict(), before)


def test_what_others_write_into_a_group_is_kept() -> None:
    _, state = hooked(adamw(lr=0.1))
    state.param_groups[0]["initial_lr"] = 0.1
    assert state.state_dict()["param_groups"][0]["initial_lr"] == 0.1
