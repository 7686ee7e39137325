"""Tests of calls between steps, which act on any number of ranks as on one process."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import (
    Optimizer,
    TorchOptimizer,
    accumulate,
    adamw,
    apply_if_finite,
    chain,
    clip_by_global_norm,
    ema,
    lookahead,
    muon,
    partition,
    prodigy,
    schedule_free_adamw,
    sgd,
    stored,
)
from sharding import ZeroRedundancyOptimizer
from sharding.transport.local import LocalWorld
from sharding.transport.local_group import LocalGroup
from tests.choices import EVERYTHING, MORE, case
from tests.composition.trees import SHAPES, grads_at, kind, params_of

from .compare import difference, differing

CHAINS: dict[str, Callable[[], Optimizer]] = {
    "lookahead": lambda: chain(adamw(0.1), lookahead(2)),
    "average": lambda: chain(adamw(0.1), ema(0.9)),
    "clipped": lambda: chain(clip_by_global_norm(0.5), adamw(0.1)),
    "accumulate": lambda: chain(accumulate(3), adamw(0.1)),
    "accumulate, lookahead": lambda: chain(accumulate(2), adamw(0.1), lookahead(2)),
    "finite": lambda: chain(apply_if_finite(3), adamw(0.1)),
    "parts": lambda: partition({"matrices": sgd(0.1, momentum=0.9), "rest": adamw(0.1)}, kind),
    "muon": lambda: partition({"matrices": muon(0.1), "rest": adamw(0.1)}, kind),
    "schedule-free": lambda: schedule_free_adamw(0.1),
    "prodigy": lambda: prodigy(1.0, d0=1e-2),
}
BEGIN_AT_PARAMS = ("lookahead", "average", "accumulate, lookahead", "schedule-free", "prodigy")
"""Optimizers whose state or view is initialized from the parameters."""

EVENTS = ("none", "none", "add", "freeze", "lr", "write", "new", "few", "no gradient")

Make = Callable[[Any], Any]
"""Function from named parameters to an optimizer."""


def named(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: one.to(dtype).requires_grad_() for name, one in params_of().items()}


def values(params: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: one.detach().clone() for name, one in params.items()}


def zero_of(optimizer: Callable[[], Optimizer], group: LocalGroup, policy: str) -> Make:
    def made(params: Any) -> ZeroRedundancyOptimizer:
        views = group.size() % 2 == 0
        return ZeroRedundancyOptimizer(params, optimizer(), group, views, policy=policy)

    return made


def saved_of(optimizer: Any) -> dict[str, Any]:
    """Return a state dict, on every rank."""
    if not isinstance(optimizer, ZeroRedundancyOptimizer):
        return copy.deepcopy(optimizer.state_dict())
    found: dict[str, Any] = {}
    for rank in range(optimizer.world_size):
        optimizer.consolidate_state_dict(rank)
        if rank == optimizer.rank:
            found = copy.deepcopy(optimizer.state_dict())
    return found


def walk(make: Make, events: list[str]) -> list[dict[str, Tensor]]:
    """Run one event before each step, and return the parameters after each step."""
    params, found = named(), []
    first = list(params.items())[:3]
    last = {"params": list(params.items())[3:]}
    optimizer, is_added = make(first), False
    for step, event in enumerate(events):
        if event == "add" and not is_added:
            lr = optimizer.param_groups[0]["lr"]  # some optimizers refuse a different lr
            optimizer.add_param_group({**last, "lr": lr})
            is_added = True
        elif event == "freeze":
            params["body.bias"].requires_grad_(not params["body.bias"].requires_grad)
        elif event == "lr":
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
        elif event == "write":
            with torch.no_grad():
                params["body.weight"].mul_(0.5)
        elif event == "new":
            saved, optimizer = saved_of(optimizer), make(first)
            if is_added:
                optimizer.add_param_group(dict(last))
            optimizer.load_state_dict(saved)
        missing = {"few": {"body.weight", "scale"}, "no gradient": {*SHAPES}}.get(event, set())
        for name, grad in grads_at(step).items():
            trained = name not in missing and params[name].requires_grad
            params[name].grad = grad if trained else None
        optimizer.step()
        found.append(values(params))
    return found


@pytest.mark.parametrize("name", CHAINS)
def test_a_walk_through_all_that_may_come_between_steps(name: str) -> None:
    for seed in range(2 * (MORE if EVERYTHING else 1)):
        draw = random.Random(f"{name}, {seed}")
        events = draw.choices(EVENTS, k=14)
        wanted = walk(lambda params: TorchOptimizer(params, CHAINS[name]()), events)

        # The squares of a parameter that is cut are summed in another order.
        policies = ["greedy"] if name in ("clipped", "prodigy") else ["greedy", "elements"]
        ranks, policy = draw.choice([2, 3]), draw.choice(policies)

        def trains(group: Any, policy: str = policy, events: list[str] = events) -> Any:
            return walk(zero_of(CHAINS[name], group, policy), events)

        with case(seed=seed, ranks=ranks, policy=policy, events=events):
            for found in LocalWorld(ranks).run(trains):
                assert difference(found, wanted) == []


def begun(make: Make, dtype: torch.dtype, looks_first: bool) -> list[list[Tensor]]:
    """Return views and parameters of a run whose parameters change before the first step."""
    params = named(dtype)
    optimizer = make(list(params.items()))
    with torch.no_grad():
        for one in params.values():
            one.mul_(0.5)
    found = [[one.clone() for one in optimizer.view().values()]] if looks_first else []
    for step in range(4):
        for name, grad in grads_at(step).items():
            params[name].grad = grad.to(dtype)
        optimizer.step()
    return [*found, list(optimizer.view().values()), list(values(params).values())]


@pytest.mark.parametrize("policy", ["greedy", "elements"])
@pytest.mark.parametrize("name", [*BEGIN_AT_PARAMS, "master"])
def test_state_begins_at_the_parameters_of_the_first_step(name: str, policy: str) -> None:
    """State starts from the parameters of the first step, as with a TorchOptimizer.

    So a model can be loaded after its optimizer was created.
    """
    dtype = torch.bfloat16 if name == "master" else torch.float32

    def optimizer() -> Optimizer:
        return stored(adamw(0.1), param="bfloat16+master") if name == "master" else CHAINS[name]()

    policy = "greedy" if name == "prodigy" else policy
    for looks in (False, True):

        def trains(group: Any, looks: bool = looks) -> Any:
            return begun(zero_of(optimizer, group, policy), dtype, looks)

        wanted = begun(lambda params: TorchOptimizer(params, optimizer()), dtype, looks)
        with case(looks_first=looks):
            for found in LocalWorld(2).run(trains):
                assert difference(found, wanted) == []


@pytest.mark.parametrize("source", ["run", "state dict"])
def test_what_a_gate_kept_of_a_parameter_that_is_frozen_by_now_reaches_every_rank(
    source: str,
) -> None:
    """A frozen parameter is stepped on all ranks by a gradient that a gate kept earlier.

    Only its owner knows that the gate kept a gradient.
    """

    def trains(make: Make) -> dict[str, Tensor]:
        params = named()
        optimizer = make(list(params.items()))
        for step in range(3):
            if step == 1:
                params["body.bias"].requires_grad_(False)
                if source == "state dict":
                    saved, optimizer = saved_of(optimizer), make(list(params.items()))
                    optimizer.load_state_dict(saved)
            for name, grad in grads_at(step).items():
                params[name].grad = grad if params[name].requires_grad else None
            optimizer.step()
        return values(params)

    wanted = trains(lambda params: TorchOptimizer(params, CHAINS["accumulate"]()))
    assert not torch.equal(wanted["body.bias"], params_of()["body.bias"])
    for found in LocalWorld(3).run(
        lambda group: trains(zero_of(CHAINS["accumulate"], group, "greedy"))
    ):
        assert differing(found, wanted) == []


@pytest.mark.parametrize("name", BEGIN_AT_PARAMS)
def test_state_may_be_loaded_before_the_parameters(name: str) -> None:
    """State can be loaded before the parameters.

    The state of a parameter that was frozen so far starts from the value at its first step.
    """

    def steps(params: dict[str, Tensor], optimizer: Any, numbers: range) -> None:
        for number in numbers:
            params["body.bias"].requires_grad_(number > 4)
            for path, grad in grads_at(number).items():
                params[path].grad = grad if params[path].requires_grad else None
            optimizer.step()

    params = named()
    optimizer = TorchOptimizer(list(params.items()), CHAINS[name]())
    steps(params, optimizer, range(3))
    saved, loaded = copy.deepcopy(optimizer.state_dict()), values(params)
    steps(params, optimizer, range(3, 8))

    def trains(group: Any) -> dict[str, Tensor]:
        others = named()
        others["body.bias"].requires_grad_(False)
        with torch.no_grad():
            others["body.bias"].mul_(0.5)
        zero = zero_of(CHAINS[name], group, "greedy")(list(others.items()))
        zero.load_state_dict(saved)
        with torch.no_grad():
            for path, one in loaded.items():
                others[path].copy_(one)
        steps(others, zero, range(3, 8))
        return values(others)

    for found in LocalWorld(2).run(trains):
        assert differing(found, params) == []
