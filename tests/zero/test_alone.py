"""Tests with one rank: the constructor, its arguments, and plans."""

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable

from functional_optim import (
    adam,
    adamw,
    chain,
    muon,
    register_functional_optim,
    sgd,
    weight_decay,
)
from functional_optim.frontends.registry import _REGISTERED
from sharding import MatrixBlocks, ParameterSpec, ZeroRedundancyOptimizer, plan, specs_of

from .alone import params, step
from .towers import Halving

pytestmark = pytest.mark.usefixtures("world_of_one")


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        (torch.ones(2), TypeError, "must be an iterable"),
        (7, TypeError, "got int"),
        ([], ValueError, "empty"),
        ([torch.ones(2), {"params": [torch.ones(2)]}], TypeError, "all of one kind"),
        ([torch.ones(2), "weight"], TypeError, "all of one kind"),
        ([{"lr": 0.1}], ValueError, "under 'params'"),
        ([torch.ones(2).to_sparse()], ValueError, "must be dense"),
        ([{"params": [torch.ones(2).to_sparse()]}], ValueError, "must be dense"),
        ([("a", torch.ones(2)), ("a", torch.ones(2))], ValueError, "two parameters have the name"),
    ],
)
def test_params_that_are_refused(given: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        ZeroRedundancyOptimizer(given, torch.optim.SGD)


@pytest.mark.parametrize("views", [False, True])
def test_a_parameter_twice_is_torchs_business(views: bool) -> None:
    (param,) = params(3)
    with pytest.warns(UserWarning, match="duplicate"):
        zero = ZeroRedundancyOptimizer(
            [param, param], torch.optim.SGD, parameters_as_bucket_view=views, lr=0.5
        )
    step(zero)
    assert param.tolist() == [-0.5, 0.5, 1.5]  # stepped once
    with pytest.raises(ValueError, match="more than one parameter group"):
        ZeroRedundancyOptimizer([{"params": [param]}, {"params": [param]}], torch.optim.SGD)


def add_to_the_first_group(groups: list[dict[str, Any]]) -> None:
    groups[0]["params"].append(torch.nn.Parameter(torch.ones(2)))


def move_to_the_second_group(groups: list[dict[str, Any]]) -> None:
    groups[1]["params"].append(groups[0]["params"].pop())


def replace_one(groups: list[dict[str, Any]]) -> None:
    groups[0]["params"][1] = torch.nn.Parameter(torch.ones(2))


def remove_a_group(groups: list[dict[str, Any]]) -> None:
    del groups[1]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (add_to_the_first_group, r"a new parameter was in no group .* is in param_groups\[0\]"),
        (move_to_the_second_group, r"'0.1' was in param_groups\[0\] .* in param_groups\[1\] now"),
        (replace_one, r"'0.1' was in param_groups\[0\] .* is in no group now"),
        (remove_a_group, r"'1.0' was in param_groups\[1\] .* is in no group now"),
    ],
)
@pytest.mark.parametrize("hooked", [False, True])
def test_parameters_that_are_changed_in_groups_by_hand_are_refused(
    change: Callable[[Any], None], told: str, hooked: bool
) -> None:
    """Who steps which parameter is fixed by the plan: before, such a change had no effect."""
    one, two, three, four = params(3, 2, 2, 1)
    groups = [{"params": [one, two]}, {"params": [three, four], "lr": 0.25}]
    zero = ZeroRedundancyOptimizer(groups, torch.optim.SGD, lr=0.5)
    step(zero)
    zero.param_groups[0]["params"].reverse()  # another order has no effect, and needs none
    step(zero)
    zero.param_groups[0]["params"].reverse()
    before = [param.tolist() for param in (one, two, three, four)]
    change(zero.param_groups)
    with pytest.raises(ValueError, match=f"{told}.*put 'params' back"):
        zero.check_groups() if hooked else step(zero)
    assert [param.tolist() for param in (one, two, three, four)] == before


def test_is_an_optimizer_and_a_joinable() -> None:
    zero = ZeroRedundancyOptimizer(params(), torch.optim.Adam)
    assert isinstance(zero, torch.optim.Optimizer) and isinstance(zero, Joinable)
    assert (zero.rank, zero.global_rank, zero.world_size) == (0, 0, 1)
    assert zero.join_process_group is dist.group.WORLD
    assert zero.join_device == torch.device("cpu")
    assert zero.process_group is dist.group.WORLD
    assert "ZeroRedundancyOptimizer" in repr(zero)


@pytest.mark.parametrize(
    "cls", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Rprop]
)
def test_groups_have_the_options_of_the_class(cls: Any) -> None:
    one, two = params(), params()
    zero, other = ZeroRedundancyOptimizer(one, cls, lr=0.25), cls(two, lr=0.25)
    assert zero.defaults == other.defaults
    assert [group.keys() for group in zero.param_groups] == [
        group.keys() for group in other.param_groups
    ]
    assert zero.optim.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"lr": -1.0}, ValueError),
        ({"betas": (1.0, 0.9)}, ValueError),
        ({"weight": 1}, TypeError),
        ({"policy": "unheard of"}, ValueError),
        ({"executor": "unheard of"}, ValueError),
        ({"plan": "plan"}, TypeError),
    ],
)
def test_arguments_that_are_refused(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        ZeroRedundancyOptimizer(params(), torch.optim.AdamW, **arguments)


def test_a_group_with_a_wrong_option_is_refused() -> None:
    with pytest.raises(ValueError, match="lr"):
        ZeroRedundancyOptimizer([{"params": params(), "lr": math.nan}], torch.optim.Adam)


class Functional(nn.Module):
    """Stand-in for a functional class of torch, whose import would warn."""


Functional.__module__ = "torch.distributed.optim.functional_adam"
Functional.__name__ = "_FunctionalAdam"


def test_functional_classes_of_torch_need_overlap() -> None:
    with pytest.raises(ValueError, match=r"pass torch\.optim\.Adam"):
        ZeroRedundancyOptimizer(params(), Functional)
    zero = ZeroRedundancyOptimizer(params(), Functional, overlap_with_ddp=True, lr=0.5)
    assert zero.param_groups[0]["lr"] == 0.5


def test_overlap_needs_a_functional_equivalent() -> None:
    with pytest.raises(ValueError, match="has no functional equivalent"):
        ZeroRedundancyOptimizer(params(), Halving, overlap_with_ddp=True)


def test_step_under_overlap_warns(caplog: pytest.LogCaptureFixture) -> None:
    zero = ZeroRedundancyOptimizer(params(), torch.optim.SGD, overlap_with_ddp=True, lr=1.0)
    zero.step_owned({"0.0": [(0, 3, torch.ones(3))]})
    with caplog.at_level(logging.WARNING):
        assert step(zero) is None
    assert "overlap_with_ddp=True" in caplog.text
    assert zero.params["0.0"].tolist() == [-1.0, 0.0, 1.0]


def test_overlap_without_a_hook_is_an_error_and_no_training_without_steps() -> None:
    zero = ZeroRedundancyOptimizer(params(), torch.optim.SGD, overlap_with_ddp=True, lr=1.0)
    with pytest.raises(RuntimeError, match="none was called: nothing was stepped. Register one"):
        step(zero)
    assert zero.params["0.0"].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("wanted", [sgd(lr=0.5, momentum=0.5), sgd, "sgd", torch.optim.SGD])
def test_kinds_of_optimizers(wanted: Any) -> None:
    if wanted == "sgd":
        register_functional_optim("sgd", sgd)
    try:
        arguments = {} if not callable(wanted) and wanted != "sgd" else {"momentum": 0.5, "lr": 0.5}
        one, two = params(), params()
        zero = ZeroRedundancyOptimizer(one, wanted, **arguments)
        other = torch.optim.SGD(two, lr=0.5, momentum=0.5, foreach=False)
        for value in (1.0, 3.0):
            step(zero, value)
            step(other, value)
        assert all(map(torch.equal, one, two))
        assert zero.param_groups[0]["momentum"] == 0.5
    finally:
        _REGISTERED.pop("sgd", None)


def test_options_beside_an_optimizer_are_its_hyperparameters() -> None:
    zero = ZeroRedundancyOptimizer(params(), adamw(lr=0.5), lr=0.25)
    assert zero.param_groups[0]["lr"] == 0.25
    with pytest.raises(TypeError, match="no hyper-parameter"):
        ZeroRedundancyOptimizer(params(), adamw(), rate=0.25)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_another_weight_decay_of_a_state_dict_is_refused(decay: float) -> None:
    given = params()
    zero = ZeroRedundancyOptimizer(given, chain(weight_decay(decay), adam(weight_decay=decay)))
    step(zero, 1.0)
    zero.consolidate_state_dict()
    saved = zero.state_dict()
    assert "weight_decay" not in saved["param_groups"][0]
    saved["param_groups"][0]["decoupled_weight_decay"] = True
    if decay:
        with pytest.raises(ValueError, match="has decoupled weight decay, .* such as adamw"):
            zero.load_state_dict(saved)
    else:
        zero.load_state_dict(saved)
    assert "decoupled_weight_decay" not in zero.param_groups[0]


def test_something_else_is_refused() -> None:
    with pytest.raises(TypeError, match="optimizer_class must be"):
        ZeroRedundancyOptimizer(params(), 7)
    with pytest.raises(TypeError, match="must make a torch.optim.Optimizer"):
        ZeroRedundancyOptimizer(params(), lambda groups: groups)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_execution_options_are_taken(options: dict[str, bool]) -> None:
    one, two = params(70_000, 10), params(70_000, 10)
    zero = ZeroRedundancyOptimizer(one, torch.optim.AdamW, **options)
    other = torch.optim.AdamW(two, foreach=False)
    for value in (1.0, -2.0):
        step(zero, value)
        step(other, value)
    for ours, theirs in zip(one, two, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert {key: zero.param_groups[0][key] for key in options} == options


# ---------------------------------------------------------------------------------------- plans


def test_a_plan_that_was_made_before() -> None:
    named = dict(zip("ab", params(8, 4), strict=True))
    made = plan(specs_of(named), 1, "elements")
    zero = ZeroRedundancyOptimizer(list(named.items()), torch.optim.SGD, plan=made, lr=1.0)
    assert zero.plan.policy == "elements"
    assert [one.path for one in zero.owned] == ["a", "b"]
    zero.add_param_group({"params": [("c", nn.Parameter(torch.ones(2)))]})
    assert [one.path for one in zero.owned] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("specs", "ranks", "told"),
    [
        ([ParameterSpec("a", (8,)), ParameterSpec("b", (5,))], 1, "'b', has shape"),
        ([ParameterSpec("a", (8,))], 1, "'b'"),
        ([ParameterSpec("a", (8,)), ParameterSpec("b", (4,))], 2, "for 2 ranks"),
    ],
)
def test_a_plan_for_another_model(specs: Any, ranks: int, told: str) -> None:
    named = list(zip("ab", params(8, 4), strict=True))
    with pytest.raises(ValueError, match=told):
        ZeroRedundancyOptimizer(named, torch.optim.SGD, plan=plan(specs, ranks))


def test_a_plan_of_blocks_is_refused() -> None:
    """A plan of blocks is refused, because the parameter would be stepped as one matrix."""
    blocks = MatrixBlocks(row_blocks=2)
    made = plan([ParameterSpec("w", (4, 2), kind="per_matrix", blocks=blocks)], 1)
    named = [("w", nn.Parameter(torch.ones(4, 2)))]
    with pytest.raises(ValueError, match=r"'w' has MatrixBlocks.* steps whole parameters; make"):
        ZeroRedundancyOptimizer(named, muon(), plan=made)


def test_what_is_needed_whole_is_not_cut() -> None:
    with pytest.raises(ValueError, match="per_matrix"):
        ZeroRedundancyOptimizer(params(), Halving, policy="elements")
