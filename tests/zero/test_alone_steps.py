"""Tests of steps on one rank: hooks, options, gradients, and several kinds of chains."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_model
from torch import nn

from functional_optim import (
    chain,
    clip_by_global_norm,
    sgd,
)
from functional_optim.core.buffer_memory import buffer_of
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


def test_schedulers_find_the_options_of_a_class_without_equivalent() -> None:
    """Some schedulers of torch look for options in ``defaults``."""

    class Own(torch.optim.Adam):
        """Adam under another name."""

    made: list[Any] = [Own(params(), lr=1.0), ZeroRedundancyOptimizer(params(), Own, lr=1.0)]
    for one in made:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(one, max_lr=0.1, total_steps=4)
        for _ in range(2):
            for param in one.param_groups[0]["params"]:
                param.grad = torch.ones_like(param)
            one.step()
            scheduler.step()
    assert made[0].param_groups[0]["betas"] == made[1].param_groups[0]["betas"]
    assert made[0].param_groups[0]["betas"] != made[0].defaults["betas"]
    assert made[1].defaults == made[0].defaults


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


def test_state_that_does_not_fit_is_named() -> None:
    zero = ZeroRedundancyOptimizer(params(), torch.optim.Adam, lr=1.0)
    step(zero)
    before = zero.params["0.0"].tolist()
    zero.param_groups[0]["amsgrad"] = True
    with pytest.raises(
        ValueError,
        match=r"'0\.0' does not fit .*differing: max_exp_avg_sq.*when the optimizer is constructed",
    ):
        step(zero)
    zero.param_groups[0]["amsgrad"] = False
    zero.optim.state[zero.params["0.0"]]["exp_avg"] = torch.ones(7)
    with pytest.raises(ValueError, match="exp_avg"):
        step(zero)
    assert zero.params["0.0"].tolist() == before


Change = Callable[[int, Any, list[nn.Parameter]], None]
"""Change before a step: a function of its number, the optimizer, and the parameters."""


def momentum(*values: float) -> Change:
    def change(number: int, optimizer: Any, _: Any) -> None:
        optimizer.param_groups[0]["momentum"] = values[number % len(values)]

    return change


def amsgrad(number: int, optimizer: Any, _: Any) -> None:
    optimizer.param_groups[0]["amsgrad"] = True


def fill_lr(number: int, optimizer: Any, _: Any) -> None:
    optimizer.param_groups[0]["lr"].fill_(0.5 / (1 + number))


def write_state(number: int, optimizer: Any, params: list[nn.Parameter]) -> None:
    if number == 3:
        optimizer = getattr(optimizer, "optim", optimizer)
        optimizer.state[params[0]]["exp_avg"].mul_(2.0)
        optimizer.state[params[1]]["exp_avg_sq"] = torch.full((2,), 0.125)


def delete_state(number: int, optimizer: Any, params: list[nn.Parameter]) -> None:
    if number == 3:
        del getattr(optimizer, "optim", optimizer).state[params[1]]


def freeze(number: int, _: Any, params: list[nn.Parameter]) -> None:
    params[0].requires_grad_(number > 3)


CHANGES: dict[str, tuple[Any, dict[str, Any], Change]] = {
    "amsgrad before the first step": (torch.optim.Adam, {}, amsgrad),
    "momentum on": (torch.optim.SGD, {}, momentum(0.0, *[0.5] * 8)),
    "momentum on, damped": (torch.optim.SGD, {"dampening": 0.5}, momentum(0.0, *[0.5] * 8)),
    "momentum off and on": (torch.optim.SGD, {}, momentum(0.5, 0.5, 0.0)),
    "lr in a tensor": (torch.optim.AdamW, {"lr": torch.tensor(0.5)}, fill_lr),
    "state is written": (torch.optim.Adam, {}, write_state),
    "state is deleted": (torch.optim.Adam, {}, delete_state),
    "trained late": (torch.optim.AdamW, {}, freeze),
    "experts": (torch.optim.SGD, {}, momentum(*[0.9] * 3, *[0.0] * 3)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_between_steps_are_those_of_torch(name: str) -> None:
    """Options, state and trainability may change before any step, as with torch.optim."""
    cls, options, change = CHANGES[name]
    one, two = params(3, 2, 4), params(3, 2, 4)
    zero = ZeroRedundancyOptimizer(one, cls, **{"lr": 0.5, **options})
    other = cls(two, foreach=False, **{"lr": 0.5, **copy.deepcopy(options)})
    for number in range(9):
        chosen = ((0, 1, 2), (0, 2), (1,))[number % 3] if name == "experts" else (0, 1, 2)
        for every, optimizer in ((one, zero), (two, other)):
            change(number, optimizer, every)
            for place, param in enumerate(every):
                given = param.requires_grad and place in chosen
                param.grad = torch.full_like(param, 1.0 - number / 4) if given else None
            optimizer.step()
        assert all(map(torch.equal, one, two)), number
    for ours, theirs in zip(one, two, strict=True):
        found, wanted = zero.optim.state[ours].keys(), other.state[theirs].keys()
        assert found - {"step"} == wanted - {"step"}  # torch's SGD counts no steps
        if "step" in other.state[theirs]:
            assert int(zero.optim.state[ours]["step"]) == int(other.state[theirs]["step"])


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


def test_a_class_that_takes_only_matrices_is_stepped_as_torch_steps_it() -> None:
    ours, theirs = (nn.Parameter(torch.arange(6.0).view(2, 3)) for _ in range(2))
    zero, twin = ZeroRedundancyOptimizer([ours], torch.optim.Muon), torch.optim.Muon([theirs])
    for value in (1.0, -0.5):
        step(zero, value)
        step(twin, value)
    assert torch.equal(ours, theirs)
