"""Tests of the local optimizer of a shard, which has the interface of any local optimizer."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import Optimizer, adamw, chain, clip_by_global_norm, partition, sgd
from functional_optim.frontends.local_optimizer import LocalOptimizer, local_optimizer
from sharding import ZeroRedundancyOptimizer
from sharding.transport.local import LocalWorld
from tests.choices import case
from tests.composition.trees import grads_at, kind, params_of

CHOSEN: dict[str, Callable[[], Optimizer]] = {
    "adamw": lambda: adamw(0.1),
    "clipped": lambda: chain(clip_by_global_norm(0.5), sgd(0.1, momentum=0.9)),
    "parts": lambda: chain(
        clip_by_global_norm(0.5), partition({"matrices": sgd(0.1), "rest": adamw(0.1)}, kind)
    ),
}


def named() -> dict[str, Tensor]:
    return {name: one.requires_grad_() for name, one in params_of().items()}


def stepped(
    local: LocalOptimizer, given: list[Tensor | None], summed: Callable[..., Tensor]
) -> None:
    """Measure all totals and step a local optimizer, as every front-end does."""
    measured: list[Tensor] = []
    for _ in range(local.measured_stages):
        measured.append(summed(local.measure(given, measured=measured)))
    local.step(given, measured=measured)


def in_order(added: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for one in added:
        total = total + one
    return total


@pytest.mark.parametrize("name", CHOSEN)
def test_alone_it_is_what_the_factory_makes(name: str) -> None:
    """On one rank, the local optimizer of ZeRO steps as the one that local_optimizer makes.

    State and options can be restored in the middle of a run.
    """

    def of_rank(group: Any) -> None:
        params, twins = named(), named()
        zero = ZeroRedundancyOptimizer(params.items(), CHOSEN[name](), process_group=group)
        local: LocalOptimizer = zero.optim.local
        twin = local_optimizer(CHOSEN[name](), twins.items())
        names = [
            next(key for key, one in params.items() if one is param)
            for own in local.param_groups
            for param in own["params"]
        ]
        for step in range(6):
            grads = grads_at(step, missing={1: "scale", 4: "body.bias"})
            stepped(local, [grads[one] for one in names], in_order)
            stepped(twin, [grads[one] for one in names], in_order)
            for key, param in params.items():
                assert torch.equal(param, twins[key]), (step, key)
            assert all(param.grad is None for param in params.values())
            for one in (local, twin):
                for own in one.param_groups:
                    if "lr" in own:
                        own["lr"] *= 0.5
            if step == 2:
                saved = copy.deepcopy(local.state_dict())
                stepped(local, [grads_at(7)[one] for one in names], in_order)
                local.load_state_dict(saved)
                for key, param in params.items():
                    param.data.copy_(twins[key].data)

    LocalWorld(1).run(of_rank)


def test_ranks_that_are_given_the_same_totals_step_as_one() -> None:
    """Local optimizers on several ranks step as one process does, also with cut parameters.

    A piece accepts its own gradient or the gradient of the whole parameter.
    """
    want, twin = named(), CHOSEN["adamw"]()
    state = twin.init(want)
    for step in range(2):
        twin.update_(want, grads_at(step), state)
    for by_part in (False, True):
        with case(by_part=by_part):
            cut_shards: list[Any] = []

            def of_rank(group: Any, by_part: bool = by_part, cut_shards: Any = cut_shards) -> None:
                params = named()
                zero = ZeroRedundancyOptimizer(
                    params.items(), twin, process_group=group, policy="elements"
                )
                local = zero.optim.local
                for step in range(2):
                    grads: list[Tensor | None] = []
                    for one in local.shards:
                        grad = grads_at(step)[one.path]
                        cut = by_part and not one.whole
                        grads.append(grad.reshape(-1)[one.start : one.stop] if cut else grad)
                    local.step(grads)
                cut_shards.extend(one for one in local.shards if not one.whole)
                for one in local.shards:
                    own = want[one.path].detach().reshape(-1)[one.start : one.stop]
                    assert torch.equal(one.tensor.detach().reshape(-1), own)

            LocalWorld(3).run(of_rank)
            assert cut_shards


def test_what_does_not_fit_changes_nothing() -> None:
    def of_rank(group: Any) -> None:
        params = named()
        zero = ZeroRedundancyOptimizer(params.items(), adamw(0.1), process_group=group)
        local = zero.optim.local
        given = [grads_at(0)[one.path] for one in local.shards]
        local.step(given)
        before = {name: one.detach().clone() for name, one in params.items()}
        saved = copy.deepcopy(local.state_dict())
        odd = copy.deepcopy(saved)
        odd["param_groups"][0]["lr"] = 7.0
        first, *_, last = odd["state"]
        odd["state"][first]["exp_avg"].fill_(9.0)
        odd["state"][last]["exp_avg"] = torch.zeros(3, 3, 3)
        wrong: list[tuple[type[Exception], str, Callable[[], Any]]] = [
            (ValueError, "got 1 gradients for 4 parameters", lambda: local.step([None])),
            (ValueError, "has shape", lambda: local.step([*given[:-1], torch.zeros(2, 9)])),
            (ValueError, "no total", lambda: local.measure(given)),
            (ValueError, "exp_avg", lambda: local.load_state_dict(odd)),
        ]
        for kind_, text, call in wrong:
            with case(text=text), pytest.raises(kind_, match=text):
                call()
        assert all(torch.equal(one, before[name]) for name, one in params.items())
        now = local.state_dict()
        assert now["param_groups"] == saved["param_groups"]
        for key, entries in saved["state"].items():
            assert all(torch.equal(now["state"][key][one], entries[one]) for one in entries)

    LocalWorld(1).run(of_rank)
