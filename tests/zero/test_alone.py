"""What can be seen with one rank: the constructor, options, hooks, state, and errors."""

import copy
import functools
import logging
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable

from functional_optim import (
    TorchOptimizer,
    accumulate,
    adamw,
    chain,
    clip_by_global_norm,
    register_functional_optim,
    sgd,
)
from functional_optim.core.stage import NoState, Rule
from functional_optim.frontends.registry import _REGISTERED
from sharding import ParameterSpec, ZeroRedundancyOptimizer, plan, specs_of
from tests.zero_local.compare import difference

from .towers import Halving

pytestmark = pytest.mark.usefixtures("alone")


def params(*sizes: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.arange(float(size))) for size in sizes or (3, 2)]


def step(zero: torch.optim.Optimizer, value: float = 1.0) -> Any:
    for group in zero.param_groups:
        for param in group["params"]:
            param.grad = torch.full_like(param, value)
    return zero.step()


# ----------------------------------------------------------------------------- the constructor


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
    assert param.tolist() == [-0.5, 0.5, 1.5]  # once
    with pytest.raises(ValueError, match="more than one parameter group"):
        ZeroRedundancyOptimizer([{"params": [param]}, {"params": [param]}], torch.optim.SGD)


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
    """As torch's functional classes are named, without the import that warns."""


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
    with caplog.at_level(logging.WARNING):
        assert step(zero) is None
    assert "overlap_with_ddp=True" in caplog.text
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
    with pytest.raises(TypeError, match="and accumulate keeps some"):
        ZeroRedundancyOptimizer(params(), chain(accumulate(2), adamw()))


def test_something_else_is_refused() -> None:
    with pytest.raises(TypeError, match="optimizer_class must be"):
        ZeroRedundancyOptimizer(params(), 7)
    with pytest.raises(TypeError, match="must make a torch.optim.Optimizer"):
        ZeroRedundancyOptimizer(params(), lambda groups: groups)


def test_a_partial_is_a_class_like_others() -> None:
    zero = ZeroRedundancyOptimizer(params(), functools.partial(torch.optim.SGD, lr=0.5))
    step(zero)
    assert zero.params["0.0"].tolist() == [-0.5, 0.5, 1.5]
    assert zero.param_groups[0]["lr"] == 0.5


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


def test_what_is_needed_whole_is_not_cut() -> None:
    with pytest.raises(ValueError, match="per_matrix"):
        ZeroRedundancyOptimizer(params(), Halving, policy="elements")


# -------------------------------------------------------------------------------- torch's habits


def test_closures_hooks_and_zero_grad() -> None:
    zero = ZeroRedundancyOptimizer(params(), torch.optim.SGD, lr=1.0)
    seen: list[str] = []
    zero.register_step_pre_hook(lambda *_: seen.append("before"))
    zero.register_step_post_hook(lambda *_: seen.append("after"))

    def closure() -> float:
        seen.append("closure")
        for param in zero.params.values():
            (param.sum() * 2).backward()
        return 5.0

    assert zero.step(closure) == 5.0
    assert seen == ["before", "closure", "after"]
    assert zero.params["0.0"].tolist() == [-2.0, -1.0, 0.0]
    zero.zero_grad()
    assert [param.grad for param in zero.params.values()] == [None, None]
    assert zero.step() is None
    assert zero.params["0.0"].tolist() == [-2.0, -1.0, 0.0]
    with pytest.raises(TypeError):
        zero.step(scale=1.0)


def test_options_are_in_step_in_both_directions() -> None:
    zero = ZeroRedundancyOptimizer(params(), torch.optim.SGD, lr=1.0)
    zero.param_groups[0]["lr"] = 0.5
    zero.param_groups[0]["note"] = "mine"
    step(zero)
    assert zero.params["0.0"].tolist() == [-0.5, 0.5, 1.5]
    assert zero.optim.param_groups[0]["note"] == "mine"
    zero.optim.param_groups[0]["added"] = 1
    step(zero)
    assert zero.param_groups[0]["added"] == 1


def test_an_option_that_needs_other_state_is_named() -> None:
    zero = ZeroRedundancyOptimizer(params(), torch.optim.Adam, lr=1.0)
    before = zero.params["0.0"].tolist()
    zero.param_groups[0]["amsgrad"] = True
    with pytest.raises(ValueError, match="now needs max_exp_avg_sq"):
        step(zero)
    assert zero.params["0.0"].tolist() == before


@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_an_option_that_is_switched_on_first(dampening: float) -> None:
    one, two = params(), params()
    options = {"lr": 0.5, "dampening": dampening}
    zero = ZeroRedundancyOptimizer(one, torch.optim.SGD, **options)
    other = torch.optim.SGD(two, foreach=False, **options)
    for momentum in (0.0, 0.5, 0.5):
        for optimizer in (zero, other):
            optimizer.param_groups[0]["momentum"] = momentum
            step(optimizer)
    assert all(map(torch.equal, one, two))
    assert "momentum_buffer" in zero.optim.state[one[0]]


def test_an_option_that_is_switched_off_and_on() -> None:
    one, two = params(), params()
    zero = ZeroRedundancyOptimizer(one, torch.optim.SGD, lr=0.5, momentum=0.5)
    other = torch.optim.SGD(two, lr=0.5, momentum=0.5, foreach=False)
    for momentum in (0.5, 0.0, 0.5):
        for optimizer in (zero, other):
            optimizer.param_groups[0]["momentum"] = momentum
            step(optimizer)
    assert all(map(torch.equal, one, two))


def test_a_learning_rate_in_a_tensor() -> None:
    one, two = params(), params()
    rate = torch.tensor(0.5)
    zero = ZeroRedundancyOptimizer(one, torch.optim.AdamW, lr=rate)
    other = torch.optim.AdamW(two, lr=rate, foreach=False)
    for value in (0.5, 0.25):
        rate.fill_(value)
        step(zero)
        step(other)
    assert all(map(torch.equal, one, two))


def test_gradients_that_do_not_fit_are_refused_before_anything_changes() -> None:
    zero = ZeroRedundancyOptimizer(params(3, 2), torch.optim.SGD, lr=1.0)
    first, second = zero.params.values()
    first.grad = torch.ones(3)
    with pytest.raises(ValueError, match=r"norm_type"):
        zero.clip_grad_norm_(1.0, -1)
    second.grad = torch.ones(2)
    second.grad.data = torch.ones(2, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"gradient at '0\.1' has dtype torch.float64"):
        zero.step()
    assert first.tolist() == [0.0, 1.0, 2.0]


def test_sparse_gradients() -> None:
    tables = [nn.Embedding(6, 2, sparse=True) for _ in range(2)]
    for table in tables:  # numbers that no order of adding rounds
        table.weight.data = torch.arange(12.0).view(6, 2) / 4
    zero = ZeroRedundancyOptimizer(tables[0].parameters(), torch.optim.SGD, lr=0.5)
    other = torch.optim.SGD(tables[1].parameters(), lr=0.5)
    for table, optimizer in zip(tables, (zero, other), strict=True):
        table(torch.tensor([1, 4, 1])).sum().backward()
        optimizer.step()
    assert torch.equal(tables[0].weight, tables[1].weight)


def test_state_is_seen_and_taken_over() -> None:
    one, two = params(), params()
    zero = ZeroRedundancyOptimizer(one, torch.optim.Adam, lr=0.5)
    other = torch.optim.Adam(two, lr=0.5, foreach=False)
    for optimizer, mine in ((zero.optim, one), (other, two)):
        step(zero if optimizer is zero.optim else other)
        optimizer.state[mine[0]]["exp_avg"].mul_(2.0)  # in place
        optimizer.state[mine[1]]["exp_avg_sq"] = torch.full((2,), 0.125)  # another tensor
        step(zero if optimizer is zero.optim else other)
    assert all(map(torch.equal, one, two))
    zero.optim.state[one[0]]["exp_avg"] = torch.ones(7)
    with pytest.raises(ValueError, match="exp_avg"):
        step(zero)


def test_parameters_that_move() -> None:
    module = nn.Linear(3, 2)
    zero = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=1.0)
    module.weight.data = torch.ones(2, 3)
    step(zero)
    assert module.weight.tolist() == [[0.0] * 3] * 2
    views = ZeroRedundancyOptimizer(
        module.parameters(), torch.optim.SGD, parameters_as_bucket_view=True, lr=1.0
    )
    module.weight.data = torch.ones(2, 3)
    with pytest.raises(RuntimeError, match=r"'0\.0' is not what it was"):
        step(views)
    halved = ZeroRedundancyOptimizer(nn.Linear(2, 2).parameters(), torch.optim.SGD)
    for param in halved.params.values():
        param.data = param.data.half()
    with pytest.raises(RuntimeError, match="dtype"):
        halved.step()


def test_views_keep_objects_values_and_strides() -> None:
    module = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    weight, before = module.weight, module.weight.detach().clone()
    zero = ZeroRedundancyOptimizer(
        module.parameters(), torch.optim.SGD, parameters_as_bucket_view=True
    )
    assert module.weight is weight
    assert weight.stride() == before.stride() and torch.equal(weight, before)
    start = weight.untyped_storage().data_ptr()
    assert module.bias is not None and module.bias.untyped_storage().data_ptr() == start
    saved = weight * module.weight.sum()
    step(zero)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


def test_integers_are_let_be() -> None:
    table = nn.Parameter(torch.arange(3), requires_grad=False)
    weight = nn.Parameter(torch.ones(2))
    zero = ZeroRedundancyOptimizer([table, weight], torch.optim.Adagrad, lr=1.0)
    weight.grad = torch.ones(2)
    zero.step()
    assert table.tolist() == [0, 1, 2]
    assert weight.tolist() == [0.0, 0.0]


def test_complex_parameters() -> None:
    one, two = (nn.Parameter(torch.tensor([1 + 2j, 3 - 1j])) for _ in range(2))
    zero = ZeroRedundancyOptimizer([one], adamw(lr=0.5), parameters_as_bucket_view=True)
    other = TorchOptimizer([two], adamw(lr=0.5))
    for value in (1.0, -2.0):
        step(zero, value)
        step(other, value)
    assert torch.equal(torch.view_as_real(one), torch.view_as_real(two))


# ---------------------------------------------------------------------------------- state dicts


def test_state_dict_hooks_and_errors() -> None:
    zero = ZeroRedundancyOptimizer(params(), torch.optim.Adam)
    with pytest.raises(RuntimeError, match=r"consolidate_state_dict\(to=0\)"):
        zero.state_dict()
    with pytest.raises(ValueError, match="0 to 0, got 1"):
        zero.consolidate_state_dict(to=1)
    step(zero)
    zero.consolidate_state_dict()
    seen: list[Any] = []
    zero.register_state_dict_post_hook(lambda _, found: seen.append(sorted(found["state"])))
    zero.register_load_state_dict_pre_hook(lambda _, found: seen.append(len(found["state"])))
    zero.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
    found = zero.state_dict()
    zero.load_state_dict(found)
    assert seen == [[0, 1], 2, "loaded"]
    kept = copy.deepcopy(found)
    step(zero)
    assert difference(found, kept) == []  # no memory is shared


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda found: found["param_groups"].pop(), "groups of"),
        (lambda found: found["param_groups"][0]["params"].pop(), "groups of"),
        (lambda found: found["state"].update({9: {}}), "parameter 9"),
        (lambda found: found["state"][1].pop("exp_avg"), "does not fit"),
        (lambda found: found["state"][1].update(exp_avg=torch.ones(5)), "another tree"),
        (lambda found: found["param_groups"][0].update(lr=-1.0), "lr"),
    ],
)
def test_state_dicts_that_are_refused(change: Any, told: str) -> None:
    zero = ZeroRedundancyOptimizer(
        [{"params": params()}, {"params": params(), "lr": 0.5}], torch.optim.Adam
    )
    step(zero)
    zero.consolidate_state_dict()
    found = copy.deepcopy(zero.state_dict())
    before = copy.deepcopy(found)
    change(found)
    with pytest.raises(ValueError, match=told):
        zero.load_state_dict(found)
    zero.consolidate_state_dict()
    assert difference(zero.state_dict(), before) == []


def test_options_that_need_other_state_are_loaded_with_it() -> None:
    one, two = params(), params()
    other = torch.optim.Adam(two, lr=0.5, amsgrad=True, foreach=False)
    zero = ZeroRedundancyOptimizer(one, torch.optim.Adam)
    step(other)
    for ours, theirs in zip(one, two, strict=True):
        ours.data.copy_(theirs.detach())
    zero.load_state_dict(other.state_dict())
    step(other, 0.1)
    step(zero, 0.1)
    assert all(map(torch.equal, one, two))
    assert zero.param_groups[0]["amsgrad"] is True
    with pytest.raises(ValueError, match="decoupled_weight_decay"):
        ZeroRedundancyOptimizer(params(), torch.optim.AdamW).load_state_dict(other.state_dict())


@pytest.mark.parametrize("policy", ["greedy", "elements"])
def test_our_optimizers_read_the_local_front_ends_checkpoints(policy: str) -> None:
    wanted = chain(clip_by_global_norm(0.5), adamw(lr=0.1, amsgrad=True))
    one, two = params(), params()
    zero, other = ZeroRedundancyOptimizer(one, wanted, policy=policy), TorchOptimizer(two, wanted)
    step(zero)
    step(other)
    zero.consolidate_state_dict()
    assert difference(zero.state_dict(), other.state_dict()) == []
    other.load_state_dict(zero.state_dict())
    zero.load_state_dict(other.state_dict())
    step(zero, 3.0)
    step(other, 3.0)
    assert all(map(torch.equal, one, two))


# ------------------------------------------------------------------------- chains of other kinds


def test_totals_are_asked_for() -> None:
    zero = ZeroRedundancyOptimizer(
        [("w", params(4)[0])], chain(clip_by_global_norm(1.0), sgd(lr=1.0))
    )
    assert zero.measured_stages == 1
    gradients = {"w": [(0, 4, torch.tensor([3.0, 0.0, 4.0, 0.0]))]}
    with pytest.raises(ValueError, match="needs 1 totals"):
        zero.step_owned(gradients)
    total = zero.total(zero.measure(gradients))
    assert total.item() == 25.0
    zero.step_owned(gradients, measured=[total])
    torch.testing.assert_close(
        zero.params["w"].detach(), torch.tensor([0.0, 1.0, 2.0, 3.0]) - gradients["w"][0][2] / 5
    )


def normed_rule(param: Tensor, grad: Tensor, state: NoState, c: Any) -> Any:
    return param - c.lr * grad / grad.norm(), state


def test_a_rule_that_needs_its_whole_tensor() -> None:
    hyper = type(sgd().links[-1].hyper)
    rule = Rule(name="normed", hyper=hyper, rule=normed_rule, kind="per_matrix")
    wanted = chain(rule(lr=1.0, momentum=0.0, dampening=0.0, nesterov=False))
    one, two = params(3, 4), params(3, 4)
    zero = ZeroRedundancyOptimizer(one, wanted, parameters_as_bucket_view=True)
    other = TorchOptimizer(two, wanted)
    for value in (1.0, 2.0):
        step(zero, value)
        step(other, value)
    assert all(map(torch.equal, one, two))
    with pytest.raises(ValueError, match="per_matrix"):
        ZeroRedundancyOptimizer(params(), wanted, policy="elements")
