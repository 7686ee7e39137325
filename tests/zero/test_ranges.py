"""Tests on threads of stepping by ranges, as communication hooks do."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import if_any
from sharding import OwnedRange, ZeroRedundancyOptimizer
from sharding.transport.local import LocalWorld
from sharding.transport.local_group import LocalGroup
from tests.zero_local.compare import differing

from .towers import CHAINS, KINDS, gradients, groups_of, made, raised

Ranges = dict[str, list[tuple[int, int, Tensor]]]
CASES = [
    ("adamw", "greedy", False, "Tower"),
    ("adamw", "elements", False, "Tower"),
    ("sgd", "elements", True, "Tower"),
    ("clipped", "greedy", True, "Tower"),
    ("clipped", "elements", True, "Tower"),
    ("lion", "elements", True, "Pictures"),
]


def given(one: OwnedRange, grad: Tensor) -> Ranges:
    """Return an owned range with its gradient."""
    return {one.path: [(one.start, one.stop, grad.reshape(-1)[one.start : one.stop])]}


def measured(zero: ZeroRedundancyOptimizer, wanted: list[Ranges]) -> list[Tensor]:
    """Return the totals that a chain needs."""
    if not zero.measured_stages:
        return []
    none = torch.zeros(len(zero.plan.specs), dtype=torch.float64)
    return [zero.total(sum((zero.measure(one) for one in wanted), none))]


@pytest.mark.parametrize(("name", "policy", "views", "kind"), CASES)
def test_ranges_in_any_order_are_one_process(
    name: str, policy: str, views: bool, kind: str
) -> None:
    """Ranges in random order, in several calls, step as one process does.

    Some parameters are unused, and the learning rates change.
    """
    exact = (name, policy) != ("clipped", "elements")  # sums by parts round differently

    def law(group: LocalGroup) -> None:
        chance, optimizer = random.Random(group.rank()), CHAINS[name]
        zero = ZeroRedundancyOptimizer(
            groups_of(made(KINDS[kind])),
            optimizer,
            group,
            views,
            policy=policy,
            overlap_with_ddp=True,
            executor="blocked",
        )
        flat = {n for n, p in zero.params.items() if p.dim() <= 1}
        params = {n: p.detach().clone() for n, p in zero.params.items() if p.requires_grad}
        state = optimizer.init(params)
        for step in range(3):
            rates = [group["lr"] for group in zero.param_groups]
            stepper = optimizer.replace(lr=rates[0])
            for path in flat & params.keys():
                stepper = stepper.override(if_any((path,)), lr=rates[1])
            grads: dict[str, Any] = gradients(params, step)
            unused = [path for number, path in enumerate(grads) if (number + step) % 4 == 0]
            mine = [one for one in zero.owned if one.path in params and one.path not in unused]
            wanted = [given(one, grads[one.path]) for one in mine]
            chance.shuffle(wanted)
            totals = measured(zero, wanted)
            for one in wanted:
                zero.step_owned(one, measured=totals)
            zero.mark_stepped()
            zero.gather()
            came = {path: None if path in unused else grad for path, grad in grads.items()}
            params, state = stepper.update(params, came, state)
            found = {path: zero.params[path].detach() for path in params}
            if exact:
                assert differing(found, params) == [], step
            torch.testing.assert_close(found, params, rtol=1e-6, atol=1e-6)
            for one in zero.param_groups:
                one["lr"] *= 0.5
        assert raised(zero.step) == "nothing"  # step() only logs a warning

    LocalWorld(3).run(law)


def test_ranges_that_a_rank_does_not_own() -> None:
    """They are refused, as are gradients that do not fit, and nothing changes."""

    def law(group: LocalGroup) -> None:
        weight, bias = (torch.nn.Parameter(torch.ones(size)) for size in (8, 2))
        zero = ZeroRedundancyOptimizer(
            [("weight", weight), ("bias", bias)],
            torch.optim.SGD,
            group,
            policy="elements",
            executor="blocked",
            lr=0.5,
        )
        one = next(one for one in zero.owned if one.path == "weight")
        start, stop = one.start, one.stop
        every = {
            own.path: [(own.start, own.stop, torch.ones(own.stop - own.start))]
            for own in zero.owned
        }
        part = {"weight": [(start + 1, stop, torch.ones(stop - start - 1))]}
        foreign = (5, 8) if group.rank() == 0 else (0, 3)

        def refused(told: str, call: Any, *given: Any) -> None:
            assert told in raised(call, *given)

        step = zero.step_owned
        its_own = f"of that parameter it owns [{start}, {stop})"
        refused(its_own, step, {"weight": [(*foreign, torch.ones(3))]})
        refused("it owns nothing", step, {"nothing": [(0, 1, torch.ones(1))]})
        refused(f"[{start + 1}, {stop}) of 'weight' are not this rank's", step, part)
        refused(
            "the gradient at 'weight' has shape (1,)",
            step,
            {"weight": [(start, stop, torch.ones(1))]},
        )
        wide = torch.ones(stop - start).double()
        refused("torch.float64", step, {"weight": [(start, stop, wide)]})
        refused("ValueError: this chain needs no total", zero.measure, every)
        step(every)
        zero.gather()
        assert (weight.tolist(), bias.tolist()) == ([0.5] * 8, [0.5] * 2)

    LocalWorld(2).run(law)
