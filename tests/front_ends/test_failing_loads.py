"""Loads that fail change nothing; odd checkpoints that torch's classes load."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from functional_optim import TorchOptimizer, adamw, rmsprop, sgd

from .support import (
    CASES,
    assert_same_tensors,
    parameters,
    params_of,
    set_grads,
    twins,
)


def started(optimizer: Any = None) -> TorchOptimizer:
    params = parameters(1)
    made = TorchOptimizer(
        [{"params": params[:1]}, {"params": params[1:], "lr": 0.5}], optimizer or adamw(0.1)
    )
    for seed in range(2):
        set_grads(params, seed)
        made.step()
    return made


def _without_groups(saved: dict[str, Any]) -> None:
    del saved["param_groups"][1]


def _shorter_group(saved: dict[str, Any]) -> None:
    saved["param_groups"][1]["params"].pop()


def _missing_field(saved: dict[str, Any]) -> None:
    del saved["state"][2]["exp_avg"]


def _unknown_field(saved: dict[str, Any]) -> None:
    saved["state"][3]["exp_avg_cube"] = saved["state"][3]["exp_avg"].clone()


def _other_shape(saved: dict[str, Any]) -> None:
    saved["state"][1]["exp_avg_sq"] = torch.zeros(2)


def _out_of_bounds(saved: dict[str, Any]) -> None:
    saved["param_groups"][1]["betas"] = (0.9, 1.5)


def _other_options(saved: dict[str, Any]) -> None:
    saved["param_groups"][0]["amsgrad"] = True


def _no_lr(saved: dict[str, Any]) -> None:
    del saved["param_groups"][1]["lr"]


BROKEN = [
    _without_groups,
    _shorter_group,
    _missing_field,
    _unknown_field,
    _other_shape,
    _out_of_bounds,
    _other_options,
    _no_lr,
]


@pytest.mark.parametrize("breaking", BROKEN)
def test_a_broken_checkpoint_is_a_value_error_and_changes_nothing(
    breaking: Callable[[dict[str, Any]], None],
) -> None:
    ours, twin, other = started(), started(), started()
    set_grads(params_of(other), 9)
    other.step()
    saved = copy.deepcopy(other.state_dict())
    breaking(saved)
    before = repr(saved)
    state, groups = ours.state, ours.param_groups
    with pytest.raises(ValueError, match=r"."):
        ours.load_state_dict(saved)
    assert repr(saved) == before
    assert ours.state is state
    assert ours.param_groups is groups
    assert repr(ours.state_dict()) == repr(twin.state_dict())
    for one in (ours, twin):
        set_grads(params_of(one), 5)
        one.step()
    assert_same_tensors(params_of(ours), params_of(twin))


@pytest.mark.parametrize("wrong", [{}, {"state": {}}, {"param_groups": []}, [], None, 3])
def test_what_is_no_checkpoint_changes_nothing(wrong: Any) -> None:
    ours, twin = started(), started()
    with pytest.raises((AttributeError, KeyError, TypeError, ValueError)):
        ours.load_state_dict(wrong)
    assert repr(ours.state_dict()) == repr(twin.state_dict())
    set_grads(params_of(ours), 5)
    ours.step()


@pytest.mark.parametrize("other", [rmsprop(0.1), sgd(0.1, momentum=0.9)])
def test_a_checkpoint_of_another_class_is_a_value_error(other: Any) -> None:
    ours = started(other)
    for saved in (started().state_dict(), twins(CASES["AdamW"]).theirs.state_dict()):
        with pytest.raises(ValueError, match=r"."):
            ours.load_state_dict(saved)
    set_grads(params_of(ours), 5)
    ours.step()


def test_a_checkpoint_with_an_empty_state_starts_anew() -> None:
    pair = twins(CASES["Adam"])
    saved = [one.state_dict() for one in (pair.ours, pair.theirs)]
    pair.step(0)
    for one, empty in zip((pair.ours, pair.theirs), saved, strict=True):
        one.load_state_dict({"state": {}, "param_groups": empty["param_groups"]})
    for seed in (1, 2):
        pair.step(seed)
        pair.assert_same()


def test_a_checkpoint_with_python_numbers_and_none() -> None:
    # Old checkpoints have step counts that are no tensors, and SGD's empty buffers as None.
    pair = twins(CASES["Adam"])
    pair.step(0)
    saved = copy.deepcopy(pair.ours.state_dict())
    for entries in saved["state"].values():
        entries["step"] = 1
    pair.ours.load_state_dict(saved)
    pair.step(1)
    pair.assert_same()
    momentum = twins(CASES["SGD momentum"])
    saved = copy.deepcopy(momentum.theirs.state_dict())
    saved["state"] = {number: {"momentum_buffer": None} for number in range(4)}
    momentum.each(lambda one: one.load_state_dict(copy.deepcopy(saved)))
    for seed in range(2):
        momentum.step(seed)
        momentum.assert_same()


def test_state_that_belongs_to_no_parameter_is_carried_along() -> None:
    pair = twins(CASES["Adam"])
    saved = copy.deepcopy(pair.theirs.state_dict())
    saved["state"]["note"] = {"by": "the user"}
    saved["state"]["number"] = 3
    pair.each(lambda one: one.load_state_dict(copy.deepcopy(saved)))
    for one in (pair.ours, pair.theirs):
        assert one.state_dict()["state"]["note"] == {"by": "the user"}
        assert one.state_dict()["state"]["number"] == 3
    pair.step(0)
    pair.assert_same()
