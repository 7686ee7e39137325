"""Copies and pickles of an optimizer, and of a model together with it."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch

from functional_optim import TorchOptimizer, adamw, to_torch_state_dict
from tests.choices import each

from .support import (
    ONE_EACH,
    assert_same_params,
    assert_same_tensors,
    parameters,
    params_of,
    run,
    twins,
    values_of,
)


def pickled(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


def saved(thing: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def copied_twice(thing: Any) -> Any:
    return copy.deepcopy(copy.deepcopy(thing))


WAYS = [copy.deepcopy, pickled, saved, copied_twice]


@each(name=ONE_EACH, way=WAYS)
def test_a_copy_continues_and_is_apart(name: str, way: Any) -> None:
    ours = twins(name).ours
    run(ours, 0, without={1})
    ours.param_groups[0]["lr"] = 0.05
    twin = way(ours)
    assert isinstance(twin, TorchOptimizer)
    assert twin.chain == ours.chain
    before = values_of(ours)
    assert_same_tensors(params_of(twin), before)
    run(twin, 1, 2)
    assert_same_tensors(params_of(ours), before)
    run(ours, 1, 2)
    assert_same_params(twin, ours)
    twin.load_state_dict(twin.state_dict())
    for one in (ours, twin):
        run(one, 3)
    assert_same_params(twin, ours)


@each(way=WAYS)
def test_a_model_and_its_optimizer_stay_together(way: Any) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = TorchOptimizer(model.parameters(), adamw(0.1))
    both = way({"model": model, "optimizer": optimizer})
    held = zip(params_of(both["optimizer"]), both["model"].parameters(), strict=True)
    assert all(a is b for a, b in held)
    before = both["model"].weight.detach().clone()
    both["model"](torch.ones(1, 3)).sum().backward()
    both["optimizer"].step()
    assert not torch.equal(both["model"].weight, before)


@each(way=WAYS)
def test_a_copy_takes_groups_schedules_and_hooks(way: Any) -> None:
    twin = way(TorchOptimizer(parameters()[:2], adamw(0.1)))
    twin.add_param_group({"params": parameters()[2:], "lr": 0.2})
    schedule = torch.optim.lr_scheduler.StepLR(twin, 1, 0.5)
    seen: list[int] = []
    twin.register_step_post_hook(lambda *_: seen.append(1))
    run(twin, 0)
    schedule.step()
    assert [group["lr"] for group in twin.param_groups] == [0.05, 0.1]
    assert seen == [1]
    with pytest.raises(ValueError, match="lr must be"):
        twin.add_param_group({"params": parameters(2), "lr": -1.0})


def test_a_copy_with_a_schedule_attached() -> None:
    pair = twins("SGD momentum")
    copies = []
    for one in pair.both:
        schedule = torch.optim.lr_scheduler.StepLR(one, 1, 0.5)
        run(one, 0)
        schedule.step()
        copies.append(copy.deepcopy(one))
        run(copies[-1], 1)
    assert_same_params(*copies)


@each(way=[copy.deepcopy, pickled])
def test_a_copied_chain_is_still_known_to_torch(way: Any) -> None:
    twin = way(adamw(0.1))
    params = {"w": torch.ones(3)}
    written = to_torch_state_dict(twin, params, twin.init(params))
    assert written["param_groups"][0]["lr"] == 0.1
