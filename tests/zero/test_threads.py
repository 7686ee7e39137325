"""Tests on threads against torch.optim: state dicts, groups, scalers, ranks that disagree."""

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sharding import ZeroRedundancyOptimizer
from sharding.transport.local import LocalWorld
from sharding.transport.local_group import LocalGroup
from tests.zero_local.compare import difference, differing

from .towers import (
    Halving,
    Tower,
    both,
    data,
    give,
    groups_of,
    made,
    plain,
    raised,
    tower,
)

BOTH = {"greedy": False, "elements": True}
"""For each policy, True if parameters are views of buffers."""
either = pytest.mark.parametrize("policy", BOTH)


def on_threads(law: Callable[..., Any], *given: Any, ranks: int = 3) -> list[Any]:
    return LocalWorld(ranks).run(lambda group: law(group, *given))


@either
@pytest.mark.parametrize("name", ["sgd", "damped", "adam", "adagrad"])
def test_state_dicts_are_the_plain_optimizers(name: str, policy: str) -> None:
    """State dicts load into a plain optimizer and, under another policy, into a sharded one."""

    def law(group: LocalGroup) -> None:
        rank, to = group.rank(), group.size() - 1
        _, zero = tower(name, group, policy, BOTH[policy])
        reference = made()
        other = plain(name, reference)
        both(zero, other, reference, range(2))
        zero.consolidate_state_dict(to=to)
        if rank == to:
            found = zero.state_dict()
            assert difference(found, other.state_dict()) == []
            again = plain(name, made())
            again.load_state_dict(copy.deepcopy(found))
            assert difference(again.state_dict(), other.state_dict()) == []
        else:
            assert "consolidate_state_dict" in raised(zero.state_dict)
        given = other.state_dict()
        given["param_groups"][0]["lr"] = other.param_groups[0]["lr"] = 0.5
        kept = copy.deepcopy(given)
        turned = "elements" if policy == "greedy" else "greedy"
        module, second = tower(name, group, turned, BOTH[turned])
        module.load_state_dict(reference.state_dict())
        second.load_state_dict(given)
        assert difference(given, kept) == []
        assert second.param_groups[0]["lr"] == second.optim.param_groups[0]["lr"] == 0.5
        both(second, other, reference, range(2, 4))

    on_threads(law)


@pytest.mark.parametrize("views", [False, True])
def test_any_other_class(views: bool) -> None:
    """A class without a functional equivalent works, even if its state is not only tensors."""

    def law(group: LocalGroup) -> None:
        module, reference = made(), made()
        zero = ZeroRedundancyOptimizer(groups_of(module), Halving, group, views, lr=0.2)
        other = Halving(groups_of(reference), lr=0.2)
        theirs = dict(reference.named_parameters())
        for step in range(3):
            give(zero, step)
            for name, param in theirs.items():
                param.grad = zero.params[name].grad
            for one in (zero, other):
                one.param_groups[0]["lr"] = 0.1 * (1 + step)
            assert zero.step(lambda: 7.0, scale=2.0) == 7.0
            other.step(scale=2.0)
        assert differing(zero.params, theirs) == []
        assert [one.get("seen") for one in zero.param_groups] == [3, 3]
        said = raised(functools.partial(zero.step_owned, {}))
        assert said.startswith("RuntimeError: Halving has no functional equivalent")
        again = ZeroRedundancyOptimizer(groups_of(made()), Halving, group)
        again.load_state_dict(other.state_dict())
        for one in (zero, again):
            one.consolidate_state_dict(to=0)
            if group.rank() == 0:
                assert difference(one.state_dict(), other.state_dict()) == []

    on_threads(law)


@pytest.mark.parametrize("views", [False, True])
def test_schedulers_and_accumulation(views: bool) -> None:
    """A scheduler and gradient accumulation work under DDP, with a new lr at every step."""

    def law(group: LocalGroup) -> None:
        ddp, twin = (
            DistributedDataParallel(made(), process_group=group, find_unused_parameters=True)
            for _ in "ab"
        )
        zero = ZeroRedundancyOptimizer(
            ddp.parameters(), torch.optim.AdamW, group, views, executor="blocked", lr=0.01
        )
        other = torch.optim.AdamW(twin.parameters(), lr=0.01, foreach=False)
        sides = [
            (net, one, torch.optim.lr_scheduler.OneCycleLR(one, max_lr=0.1, total_steps=4))
            for net, one in ((ddp, zero), (twin, other))
        ]
        rates = set()
        for step in range(3):
            for net, optimizer, scheduler in sides:
                with net.no_sync():
                    net(data(Tower, group.rank(), 50 + step)).square().sum().backward()
                net(data(Tower, group.rank(), step)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            rates.add(zero.param_groups[0]["lr"])
            assert differing(dict(ddp.named_parameters()), dict(twin.named_parameters())) == []
        assert len(rates) == 3

    on_threads(law, ranks=2)


@pytest.mark.parametrize("unscaled_first", [False, True])
def test_a_step_is_skipped_on_all_ranks(unscaled_first: bool) -> None:
    """An infinite gradient on one rank makes GradScaler skip the step on all ranks."""

    def law(group: LocalGroup) -> None:
        _, zero = tower("adam", group)
        reference = made()
        other = plain("adam", reference)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=1000)
        theirs = dict(reference.named_parameters())
        scaler.scale(torch.ones(()))  # the first call creates the scale
        for step in range(4):
            give(zero, step)
            for name, param in zero.params.items():
                theirs[name].grad = None if param.grad is None else param.grad.clone()
                if param.grad is not None:
                    param.grad.mul_(16.0)
            if step == 2 and group.rank() == 1:
                next(p for p in zero.params.values() if p.grad is not None).grad[...] = math.inf
            if unscaled_first:
                scaler.unscale_(zero)
            scaler.step(zero)
            scaler.update(16.0)
            if step != 2:
                other.step()
            assert differing(zero.params, theirs) == [], step

    on_threads(law)


DISAGREE = {
    "shape": "b: shape (5,) -> (6,)",
    "name": "b: only in the first plan\nc: only in the second plan",
    "more": "c: only in the second plan",
    "policy": "policy: 'greedy' -> 'elements'",
    "frozen": "a: requires_grad True -> False",
    "bad": "could not make a plan: ValueError: policy must be one of",
}


@pytest.mark.parametrize("what", DISAGREE)
def test_ranks_that_disagree(what: str) -> None:
    def law(group: LocalGroup) -> str:
        odd = group.rank() == group.size() - 1
        sizes = {"a": (4, 3), "b": (5,)}
        if odd:
            others = {"shape": {"b": (6,)}, "more": {"c": (1,)}}
            sizes = {"a": (4, 3), "c": (5,)} if what == "name" else sizes | others.get(what, {})
        policy = {"policy": "elements", "bad": "unheard of"}.get(what, "greedy")
        params = [(name, nn.Parameter(torch.zeros(shape))) for name, shape in sizes.items()]
        params[0][1].requires_grad_(not (odd and what == "frozen"))
        make = functools.partial(ZeroRedundancyOptimizer, params, torch.optim.SGD, group)
        return raised(make, policy=policy if odd else "greedy")

    texts = on_threads(law)
    others = "RuntimeError: " if what == "bad" else "ValueError: "
    assert texts[-1].startswith("ValueError: ")
    assert all(text.startswith(others) for text in texts[:-1])
    assert all(DISAGREE[what] in text for text in texts[:-1])
