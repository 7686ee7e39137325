"""Tests of steps on one rank: hooks, options, gradients, and several kinds of chains."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_model
from torch import Tensor, nn

from functional_optim import (
    TorchOptimizer,
    adamw,
    chain,
    clip_by_global_norm,
    sgd,
)
from functional_optim.core.buffer_memory import buffer_of
from functional_optim.core.stage import NoState, Rule
from sharding import ZeroRedundancyOptimizer

from .alone import params, step

pytestmark = pytest.mark.usefixtures("world_of_one")


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
    step(zero)
    before = zero.params["0.0"].tolist()
    zero.param_groups[0]["amsgrad"] = True
    with pytest.raises(ValueError, match="now needs max_exp_avg_sq"):
        step(zero)
    assert zero.params["0.0"].tolist() == before


def test_an_option_that_needs_other_state_before_the_first_step() -> None:
    """The first step creates the state by the options of that step, as torch's optimizers do."""
    one, two = params(), params()
    zero = ZeroRedundancyOptimizer(one, torch.optim.Adam, lr=0.5)
    other = torch.optim.Adam(two, lr=0.5, foreach=False)
    for optimizer in (zero, other):
        optimizer.param_groups[0]["amsgrad"] = True
        step(optimizer)
        step(optimizer, -0.5)
    assert all(map(torch.equal, one, two))
    assert zero.optim.state[one[0]].keys() == other.state[two[0]].keys()


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
    """The group holds a copy of the tensor, and each step reads the current value of that copy."""
    one, two = params(), params()
    rate = torch.tensor(0.5)
    zero = ZeroRedundancyOptimizer(one, torch.optim.AdamW, lr=rate)
    other = torch.optim.AdamW(two, lr=rate, foreach=False)
    for value in (0.5, 0.25):
        rate.fill_(value)
        zero.param_groups[0]["lr"].fill_(value)
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
    for table in tables:  # sums of these values are exact in any order
        table.weight.data = torch.arange(12.0).view(6, 2) / 4
    zero = ZeroRedundancyOptimizer(tables[0].parameters(), torch.optim.SGD, lr=0.5)
    other = torch.optim.SGD(tables[1].parameters(), lr=0.5)
    for table, optimizer in zip(tables, (zero, other), strict=True):
        table(torch.tensor([1, 4, 1])).sum().backward()
        optimizer.step()
    assert torch.equal(tables[0].weight, tables[1].weight)


@pytest.mark.parametrize("planned", [False, True])
def test_a_group_that_is_refused_leaves_the_others_alone(planned: bool) -> None:
    """A refused gradient in one group changes no parameter of another group, planned or not."""
    weight, table = nn.Parameter(torch.ones(3)), nn.Embedding(6, 2, sparse=True).weight
    groups = [{"params": [weight]}, {"params": [table], "lr": 0.5}]
    zero = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=0.1)
    if planned:
        step(zero)
        step(zero)
    before = weight.detach().clone()
    weight.grad = torch.ones(3)
    table.grad = torch.sparse_coo_tensor([[1]], [[1.0, 1.0]], (6, 2), check_invariants=True)
    with pytest.raises(RuntimeError, match="sparse"):
        zero.step()
    assert torch.equal(weight, before)
    assert int(zero.optim.state[weight]["step"]) == 2 * planned


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


def test_state_that_is_deleted_begins_anew() -> None:
    """A parameter whose state is deleted starts again from zero state, as in torch.optim."""
    one, two = params(), params()
    zero = ZeroRedundancyOptimizer(one, torch.optim.Adam, lr=0.5)
    other = torch.optim.Adam(two, lr=0.5, foreach=False)
    for number in range(6):
        if number == 3:
            del zero.optim.state[one[1]], other.state[two[1]]
        step(zero)
        step(other)
    assert all(map(torch.equal, one, two))
    assert [int(zero.optim.state[param]["step"]) for param in one] == [6, 3]


def test_parameters_that_are_trained_late() -> None:
    """A parameter that becomes trainable later is stepped, and the others go on as before."""
    one, two = params(3, 2, 4), params(3, 2, 4)
    for every in (one, two):
        every[0].requires_grad_(False)
    zero = ZeroRedundancyOptimizer(one, torch.optim.AdamW, lr=0.5)
    other = torch.optim.AdamW(two, lr=0.5, foreach=False)
    for number in range(8):
        for every, optimizer in ((one, zero), (two, other)):
            every[0].requires_grad_(number > 3)
            for param in every:
                param.grad = torch.ones_like(param) if param.requires_grad else None
            optimizer.step()
    assert all(map(torch.equal, one, two))
    assert [int(zero.optim.state[param]["step"]) for param in one] == [4, 8, 8]


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
    assert buffer_of(weight) is not None and buffer_of(weight) is buffer_of(module.bias)
    saved = weight * module.weight.sum()
    step(zero)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


def test_parameters_in_buffers_are_saved_by_safetensors(tmp_path: Path) -> None:
    """Fault 20: ``save_model`` raised an error, since all parameters shared one storage."""
    module = nn.Linear(3, 2)
    zero = ZeroRedundancyOptimizer(
        module.parameters(), torch.optim.SGD, lr=0.1, parameters_as_bucket_view=True
    )
    step(zero)
    save_model(module, str(tmp_path / "model"))
    found = load_file(tmp_path / "model")
    assert found.keys() == module.state_dict().keys()
    assert all(torch.equal(found[name], one) for name, one in module.state_dict().items())


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
