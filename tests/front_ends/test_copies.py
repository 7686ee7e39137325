"""Copies and pickles of an optimizer, of its chain, and of a model together with it."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from functional_optim import (
    Optimizer,
    TorchOptimizer,
    adamw,
    as_functional_optim,
    chain,
    clip_by_global_norm,
    decoupled_weight_decay,
    lion,
    qhm,
    sgd,
    to_torch_state_dict,
)

from .support import (
    CASES,
    Case,
    assert_same_tensors,
    parameters,
    params_of,
    set_grads,
    twins,
)


def pickled(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


def saved(thing: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


ways = pytest.mark.parametrize("way", [copy.deepcopy, pickled, saved])
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@ways
@every_case
def test_a_copy_continues_and_is_apart(case: Case, way: Callable[[Any], Any]) -> None:
    pair = twins(case)
    pair.step(0, without={1})
    pair.ours.param_groups[0]["lr"] = 0.05
    twin = way(pair.ours)
    assert isinstance(twin, TorchOptimizer)
    assert twin.optimizer == pair.ours.optimizer
    before = [param.detach().clone() for param in params_of(pair.ours)]
    assert_same_tensors(params_of(twin), before)
    for seed in (1, 2):
        set_grads(params_of(twin), seed)
        twin.step()
    assert_same_tensors(params_of(pair.ours), before)
    for seed in (1, 2):
        set_grads(params_of(pair.ours), seed)
        pair.ours.step()
    assert_same_tensors(params_of(twin), params_of(pair.ours))
    twin.load_state_dict(twin.state_dict())
    set_grads(params_of(twin), 3)
    twin.step()


@ways
def test_a_model_and_its_optimizer_stay_together(way: Callable[[Any], Any]) -> None:
    model = torch.nn.Linear(3, 2)
    both = way({"model": model, "optimizer": TorchOptimizer(model.parameters(), adamw(0.1))})
    assert all(
        a is b
        for a, b in zip(params_of(both["optimizer"]), both["model"].parameters(), strict=True)
    )
    before = both["model"].weight.detach().clone()
    both["model"](torch.ones(1, 3)).sum().backward()
    both["optimizer"].step()
    assert not torch.equal(both["model"].weight, before)


@ways
def test_a_copy_takes_groups_schedules_and_hooks(way: Callable[[Any], Any]) -> None:
    twin = way(TorchOptimizer(parameters(1)[:2], adamw(0.1)))
    twin.add_param_group({"params": parameters(1)[2:], "lr": 0.2})
    schedule = torch.optim.lr_scheduler.StepLR(twin, 1, 0.5)
    seen: list[int] = []
    twin.register_step_post_hook(lambda *_: seen.append(1))
    set_grads(params_of(twin), 0)
    twin.step()
    schedule.step()
    assert [group["lr"] for group in twin.param_groups] == [0.05, 0.1]
    assert seen == [1]
    with pytest.raises(ValueError, match="lr must be"):
        twin.add_param_group({"params": parameters(2), "lr": -1.0})


def test_a_copy_with_a_schedule_attached() -> None:
    pair = twins(CASES["SGD momentum"])
    for one in (pair.ours, pair.theirs):
        schedule = torch.optim.lr_scheduler.StepLR(one, 1, 0.5)
        set_grads(params_of(one), 0)
        one.step()
        schedule.step()
    ours, theirs = copy.deepcopy(pair.ours), copy.deepcopy(pair.theirs)
    for one in (ours, theirs):
        set_grads(params_of(one), 1)
        one.step()
    assert_same_tensors(params_of(ours), params_of(theirs))


CHAINS: dict[str, Optimizer] = {
    **{name: as_functional_optim(cls, **options) for name, (cls, options) in CASES.items()},
    "lion": lion(0.1, weight_decay=0.1),
    "qhm direct": qhm(0.1, weight_decay_type="direct"),
    "clipped": chain(clip_by_global_norm(1.0), decoupled_weight_decay(0.1), adamw(0.1)),
    "bare": chain(sgd(0.1, momentum=0.9).links[-1]),
}


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickled, saved])
@pytest.mark.parametrize("optimizer", CHAINS.values(), ids=CHAINS)
def test_a_copied_chain_is_the_chain(optimizer: Optimizer, way: Callable[[Any], Any]) -> None:
    twin = way(optimizer)
    assert twin == optimizer
    assert hash(twin) == hash(optimizer)
    params = {"w": torch.ones(3), "b": torch.ones(())}
    grads = {"w": torch.tensor([1.0, -2.0, 3.0]), "b": None}
    state = optimizer.init(params)
    want, _ = optimizer.update(params, grads, state)
    for start in (state, twin.init(params)):
        got, _ = twin.update(params, grads, start)
        assert torch.equal(got["w"], want["w"])
    scripted = twin.using(executor="script").update(params, grads, state)[0]
    assert torch.equal(scripted["w"], want["w"])


@pytest.mark.parametrize("way", [copy.deepcopy, pickled])
def test_a_copied_chain_is_still_known_to_torch(way: Callable[[Any], Any]) -> None:
    twin = way(adamw(0.1))
    params = {"w": torch.ones(3)}
    written = to_torch_state_dict(twin, params, twin.init(params))
    assert written["param_groups"][0]["lr"] == 0.1
