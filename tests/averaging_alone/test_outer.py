"""Outer optimizers, on ranks that are threads."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.outer_settings import OUTER_SETTINGS
from functional_optim import Optimizer, sgd
from hooks import PostLocalSGDOptimizer
from hooks.averaging import OuterModelAverager
from hooks.averaging.compression import Blocks
from sharding import ParameterSpec, plan
from sharding.transport.local import LocalWorld
from tests.choices import case

from .training import backward, batch, mean_of, model, same, train, values

STEPS = 13
RATE = 0.1


def trained(make: Callable[[nn.Module, Any], Any], size: int = 3) -> list[list[list[Tensor]]]:
    """Train by SGD; return the parameters of each rank after each step."""

    def run(group: Any) -> list[list[Tensor]]:
        module = model()
        inner = torch.optim.SGD(module.parameters(), lr=RATE)
        optimizer = PostLocalSGDOptimizer(inner, make(module, group))
        return train(module, optimizer, group.rank(), range(STEPS))

    return LocalWorld(size).run(run)


def outer_by(rule: Optimizer, period: int, **options: Any) -> Callable[[nn.Module, Any], Any]:
    return lambda module, group: OuterModelAverager(
        module.parameters(), rule, period, process_group=group, **options
    )


def close(one: list[Tensor], other: list[Tensor]) -> None:
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-5, atol=1e-6)


def by_hand(
    size: int, period: int, rate: float, momentum: float, *, nesterov: bool
) -> list[Tensor]:
    """Run DiLoCo in float64 as in its paper; return the parameters after the last outer step."""
    modules = [model().double() for _ in range(size)]
    anchor = values(modules[0])
    speed = [torch.zeros_like(one) for one in anchor]
    for step in range(STEPS):
        for rank, module in enumerate(modules):
            for param in module.parameters():
                param.grad = None
            module(batch(rank, step).double()).square().mean().backward()
            with torch.no_grad():
                for param in module.parameters():
                    param.sub_(RATE * param.grad)
        if (step + 1) % period == 0:
            ended = mean_of([values(module) for module in modules])
            for k, end in enumerate(ended):
                change = anchor[k] - end
                speed[k] = momentum * speed[k] + change
                used = change + momentum * speed[k] if nesterov else speed[k]
                anchor[k] = anchor[k] - rate * used
            with torch.no_grad():
                for module in modules:
                    for param, value in zip(module.parameters(), anchor, strict=True):
                        param.copy_(value)
            last = [one.clone() for one in anchor]
    return last


def test_diloco_and_slowmo_are_those_of_their_papers() -> None:
    for rule, rate, momentum, nesterov in [
        (sgd(lr=0.7, momentum=0.9, nesterov=True), 0.7, 0.9, True),
        (sgd(lr=0.8, momentum=0.6), 0.8, 0.6, False),
    ]:
        found = trained(outer_by(rule, 4), size=2)
        want = by_hand(2, 4, rate, momentum, nesterov=nesterov)
        with case(nesterov=nesterov):
            close(found[0][11], want)
            assert same(found[0][11], found[1][11])


def test_fragments_take_turns_and_each_is_averaged_once_in_a_period() -> None:
    period = 5
    for fragments in (1, 2, 4):
        found = trained(outer_by(sgd(lr=1.0), period, fragments=fragments))
        turns = [
            [step for step in range(STEPS) if torch.equal(found[0][step][k], found[1][step][k])]
            for k in range(4)
        ]
        with case(fragments=fragments):
            for turn in turns:
                assert turn == list(range(turn[0], STEPS, period))
            assert len({turn[0] for turn in turns}) == fragments
            assert max(turn[0] for turn in turns) == period - 1


def test_a_plan_says_which_parameters_are_a_fragment() -> None:
    specs = [ParameterSpec(str(k), tuple(one.shape)) for k, one in enumerate(model().parameters())]
    parts = plan(specs, 2, policy="greedy")
    by_plan = trained(outer_by(sgd(lr=1.0), 4, fragments=parts))
    by_count = trained(outer_by(sgd(lr=1.0), 4, fragments=2))
    assert all(same(a, b) for a, b in zip(by_plan[0], by_count[0], strict=True))


def test_any_number_of_fragments_may_be_in_flight() -> None:
    """Each mean is of the values that ranks sent, and keeps the steps that they made meanwhile."""
    period, delay, steps = 4, 3, 15

    def run(group: Any) -> list[list[float]]:
        params = [nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(4)]
        averager = OuterModelAverager(
            params, sgd(lr=1.0), period, process_group=group, fragments=4, delay=delay
        )
        seen = []
        for _ in range(steps):
            for param in params:
                param.data -= 1.0 + group.rank()
            averager.average_parameters()
            seen.append([param.item() for param in params])
        return seen

    for rank, seen in enumerate(LocalWorld(3).run(run)):
        for k in range(4):
            turn = next(one for one in range(period) if (one - k) % period == 0)
            for step in range(steps):
                begun = (step - delay - turn) // period  # the latest mean applied, from 0
                agreed = turn + 1 + begun * period  # steps that all ranks have in common
                alone = step + 1 - agreed if begun >= 0 else step + 1
                want = 1.0 - 2.0 * (agreed if begun >= 0 else 0) - (1.0 + rank) * alone
                with case(rank=rank, parameter=k, step=step):
                    assert seen[step][k] == pytest.approx(want)


def test_mixing_is_the_share_of_a_ranks_own() -> None:
    kept = trained(outer_by(sgd(lr=1.0), 4, delay=1, mixing=0.5), size=2)

    def run(group: Any) -> list[list[Tensor]]:
        module = model()
        inner = torch.optim.SGD(module.parameters(), lr=RATE)
        return train(module, inner, group.rank(), range(5))

    alone = LocalWorld(2).run(run)
    mean = mean_of([rank[3] for rank in alone])
    for rank in range(2):
        want = [
            0.5 * own.double() + 0.5 * both for own, both in zip(alone[rank][4], mean, strict=True)
        ]
        close(kept[rank][4], want)


def test_another_number_of_ranks_goes_on_from_a_checkpoint() -> None:
    """All ranks share the beginning of a period; residuals belong to one rank."""

    def made(group: Any) -> tuple[nn.Module, OuterModelAverager]:
        module, rule = model(), sgd(lr=0.7, momentum=0.9, nesterov=True)
        options: dict[str, Any] = {"process_group": group, "compression": Blocks(4)}
        return module, OuterModelAverager(module.parameters(), rule, 3, **options)

    def steps(group: Any, module: nn.Module, averager: Any, which: range) -> None:
        inner = torch.optim.SGD(module.parameters(), lr=RATE)
        train(module, PostLocalSGDOptimizer(inner, averager), group.rank(), which)

    def begin(group: Any) -> Any:
        module, averager = made(group)
        steps(group, module, averager, range(6))
        return module.state_dict(), averager.state_dict()

    saved, state = LocalWorld(2).run(begin)[0]
    del state["residuals"]

    def go_on(group: Any) -> tuple[list[Tensor], list[Tensor], int]:
        module, averager = made(group)
        module.load_state_dict(saved)
        averager.load_state_dict(state)
        fresh = not any(one.any() for one in averager._residuals)
        steps(group, module, averager, range(6, 9))
        assert fresh
        return values(module), averager.state_dict()["anchors"], averager.step

    ranks = LocalWorld(3).run(go_on)
    for now, anchors, count in ranks:
        assert same(now, anchors) and same(now, ranks[0][0]) and count == 9


def test_anchors_are_those_at_the_end_of_the_warm_up() -> None:
    def run(group: Any) -> tuple[list[Tensor], list[Tensor]]:
        module = model()
        averager = OuterModelAverager(
            module.parameters(), sgd(lr=1.0), 2, warmup_steps=3, process_group=group
        )
        for step in range(3):  # all ranks make the same steps
            backward(module, 0, step)
            torch.optim.SGD(module.parameters(), lr=RATE).step()
            averager.average_parameters(module.parameters())
        return values(module), averager.state_dict()["anchors"]

    for now, anchors in LocalWorld(2).run(run):
        assert same(now, anchors)


def test_ranks_that_did_not_begin_alike_are_named() -> None:
    for options in ({}, {"compression": Blocks(8)}):

        def run(group: Any, options: Any = options) -> str:
            param = nn.Parameter(torch.full((2,), 1.0 + (group.rank() == 2)))
            averager = OuterModelAverager([param], sgd(lr=1.0), 1, process_group=group, **options)
            with pytest.raises(ValueError, match="brought other") as caught:
                averager.average_parameters()
            return str(caught.value)

        for message in LocalWorld(3).run(run)[:2]:
            with case(options=options):
                assert message.startswith("group rank 2 (global rank 2) brought")
                assert "under an outer rule the same anchors" in message


def test_anchors_of_16_bit_parameters_are_float32() -> None:
    def run(group: Any) -> tuple[torch.dtype, Tensor]:
        param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        averager = OuterModelAverager([param], sgd(lr=1e-4), 1, process_group=group)
        for _ in range(100):  # in bfloat16, rounding would lose each change
            param.data -= 0.0625 * (1 + group.rank())
            averager.average_parameters()
        return averager.state_dict()["anchors"][0].dtype, averager._anchors[0].detach()

    for dtype, anchor in LocalWorld(2).run(run):
        assert dtype == torch.float32
        assert (anchor < 0.9995).all()


def test_settings_are_named_with_their_source() -> None:
    assert {name: (one.period, one.lr, one.momentum) for name, one in OUTER_SETTINGS.items()} == {
        "OpenDiLoCo": (500, 0.7, 0.9),
        "MuLoCo, AdamW": (30, 0.8, 0.9),
        "MuLoCo, Muon": (30, 0.9, 0.8),
        "MaxText": (36, 0.3, 0.9),
    }
    assert all(one.source and one.optimizer().hyper["nesterov"] for one in OUTER_SETTINGS.values())


def test_what_makes_no_outer_step_is_refused(world_of_one: None) -> None:
    params = list(model().parameters())
    cut = plan([ParameterSpec(str(k), tuple(p.shape)) for k, p in enumerate(params)], 3, "elements")
    rule = sgd(lr=1.0)
    for arguments, options, kind, message in [
        ((params, torch.optim.SGD, 4), {}, TypeError, "outer must be an Optimizer"),
        ((params, rule, 0), {}, ValueError, "period must be .* got 0"),
        ((params, rule, 4), {"warmup_steps": -1}, ValueError, "warmup_steps must be .* got -1"),
        ((params, rule, 4), {"delay": 4}, ValueError, "from 0 to 3, .* got 4"),
        ((params, rule, 4), {"mixing": 0.5}, ValueError, "with a delay above 0, got 0.5"),
        ((params, rule, 4), {"delay": 1, "mixing": 1.0}, ValueError, "below 1, .* got 1.0"),
        ((params, rule, 4), {"fragments": 5}, ValueError, "fragments must be from 1 to 4"),
        ((params, rule, 4), {"fragments": cut}, ValueError, "and must not cut any"),
        (([], rule, 4), {}, ValueError, "no parameters of floating numbers"),
        *[
            (
                ([*params, torch.ones(2, dtype=dtype)], rule, 4),
                {"compression": Blocks(8)},
                ValueError,
                f"parameter 4 is of {dtype}, and a compression sends the digits of float32",
            )
            for dtype in (torch.float64, torch.complex64)
        ],
    ]:
        with case(message=message), pytest.raises(kind, match=message):
            OuterModelAverager(*arguments, **options)
    averager = OuterModelAverager(params, rule, 4)
    with pytest.raises(ValueError, match="no use for further tensors"):
        averager.average_parameters(params, [torch.ones(1)])
    other = OuterModelAverager(params[:1], rule, 4)
    with pytest.raises(ValueError, match="the checkpoint's anchors have shapes"):
        averager.load_state_dict(other.state_dict())
