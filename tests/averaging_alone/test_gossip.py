"""Gossip between pairs, on ranks that are threads."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from hooks.averaging.contrib import GossipModelAverager
from hooks.averaging.contrib.pairs import partners
from sharding.transport import TransportError
from sharding.transport.local import LocalWorld
from tests.choices import case

from .training import model

SIZES = (1, 2, 3, 4, 8)
STEPS = 13


def moved(rank: int, step: int) -> float:
    """Return the change that a rank makes in its own step."""
    return math.sin(1.0 + rank + 3.0 * step)


def gossiped(size: int, period: int, **options: Any) -> list[list[float]]:
    """Return the number that each rank holds after each step."""

    def run(group: Any) -> list[float]:
        param = torch.ones(1, dtype=torch.float64)
        averager = GossipModelAverager([param], period, process_group=group, **options)
        seen = []
        for step in range(STEPS):
            param += moved(group.rank(), step)
            averager.average_parameters()
            seen.append(param.item())
        return seen

    return LocalWorld(size).run(run)


def by_hand(
    size: int, period: int, *, lr: float, momentum: float, gamma: float, seed: int
) -> list[list[float]]:
    """Compute NoLoCo as in its paper, with Python floats."""
    theta, phi, delta = [1.0] * size, [1.0] * size, [0.0] * size
    seen: list[list[float]] = [[] for _ in range(size)]
    for step in range(STEPS):
        theta = [one + moved(rank, step) for rank, one in enumerate(theta)]
        if (step + 1) % period == 0:
            pairs = partners(size, (step + 1) // period, seed)
            groups = [[r] if q is None else sorted((r, q)) for r, q in enumerate(pairs)]
            for rank, ranks in enumerate(groups):
                change = sum(theta[k] - phi[k] for k in ranks) / len(ranks)
                apart = phi[rank] - sum(phi[k] for k in ranks) / len(ranks)
                delta[rank] = momentum * delta[rank] + lr * change - gamma * apart
            phi = [one + d for one, d in zip(phi, delta, strict=True)]
            theta = list(phi)
        for own, value in zip(seen, theta, strict=True):
            own.append(value)
    return seen


def test_an_outer_step_is_that_of_the_paper() -> None:
    for size in SIZES:
        for period, rates in [
            (4, {"lr": 0.7, "momentum": 0.5, "gamma": 0.7}),
            (1, {"lr": 0.3, "momentum": 0.0, "gamma": 1.5}),
            (3, {"lr": 1.0, "momentum": 0.9, "gamma": 0.2}),
        ]:
            want = by_hand(size, period, seed=5, **rates)
            found = gossiped(size, period, seed=5, **rates)
            with case(size=size, period=period):
                for rank in range(size):
                    assert found[rank] == pytest.approx(want[rank], rel=1e-12, abs=1e-12)


def test_pairs_are_a_matching_that_is_another_each_time() -> None:
    for size in SIZES:
        rounds = [partners(size, number, seed=2) for number in range(60)]
        for number, found in enumerate(rounds):
            with case(size=size, round=number):
                assert found.count(None) == size % 2
                assert all(found[q] == r != q for r, q in enumerate(found) if q is not None)
        for rank in range(size):
            met = {found[rank] for found in rounds}
            with case(size=size, rank=rank):
                others = set(range(size)) - {rank}
                assert met == (others | {None} if size % 2 else others)
    assert partners(8, 1, seed=0) != partners(8, 1, seed=1)


def test_partners_leave_with_one_anchor_where_the_pull_is_whole() -> None:
    found = gossiped(2, 4, lr=0.5, momentum=0.0, gamma=1.0)
    assert found[0][3] == pytest.approx(found[1][3], rel=1e-14)
    assert found[0][4] != pytest.approx(found[1][4])


def test_ranks_that_began_apart_come_together() -> None:
    """Ranks that begin apart converge, for gamma up to its bound and for published settings."""

    def run(group: Any, gamma: float, momentum: float) -> list[float]:
        param = torch.tensor([float(group.rank())], dtype=torch.float64)
        averager = GossipModelAverager(
            [param], 1, gamma=gamma, momentum=momentum, process_group=group
        )
        seen = []
        for _ in range(80):  # no local changes: only anchors and pulls
            averager.average_parameters()
            seen.append(param.item())
        return seen

    rates = [(0.7, 0.5), (0.5, 0.0), (1.0, 0.3), (1.2, 0.1)]
    for size, some in ((2, rates), (4, rates), (8, rates[:1])):
        for gamma, momentum in some:
            ranks = LocalWorld(size).run(
                lambda group, gamma=gamma, momentum=momentum: run(group, gamma, momentum)
            )
            with case(size=size, gamma=gamma, momentum=momentum):
                ends = torch.tensor([seen[-1] for seen in ranks], dtype=torch.float64)
                assert ends.var().item() < 1e-4 * torch.arange(float(size)).var().item()
                assert ends.mean().item() == pytest.approx((size - 1) / 2)


def test_bytes_sent_do_not_grow_with_the_number_of_ranks() -> None:
    def run(group: Any) -> int:
        params = [torch.ones(5), torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(0)]
        params += [torch.ones(1, dtype=torch.complex64), torch.ones(2, dtype=torch.float64)]
        averager = GossipModelAverager(params, 2, process_group=group)
        for _ in range(5):
            averager.average_parameters()
        return averager.bytes_sent

    once = 2 * (5 * 4 + 6 * 4 + 8 + 2 * 8)
    for size in (2, 4, 8):
        with case(size=size):
            assert LocalWorld(size).run(run) == [2 * once] * size
    assert LocalWorld(1).run(run) == [0]
    alone = [partners(3, number).index(None) for number in (1, 2)]
    assert LocalWorld(3).run(run) == [(2 - alone.count(rank)) * once for rank in range(3)]


def test_anchors_of_16_bit_parameters_are_float32() -> None:
    def run(group: Any) -> tuple[list[torch.dtype], float]:
        param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        averager = GossipModelAverager([param], 1, lr=1e-4, momentum=0.0, process_group=group)
        for _ in range(100):  # in bfloat16, rounding would lose each change
            param.data -= 0.0625 * (1 + group.rank())
            averager.average_parameters()
        state = averager.state_dict()
        return [one.dtype for one in (*state["anchors"], *state["deltas"])], state["anchors"][0][0]

    for dtypes, anchor in LocalWorld(2).run(run):
        assert dtypes == [torch.float32] * 2
        assert anchor < 0.9995


def test_a_partner_that_is_gone_or_has_something_else_is_named() -> None:
    def gone(group: Any) -> str:
        param = torch.ones(2)
        averager = GossipModelAverager([param], 1, process_group=group)
        if group.rank() == 1:
            return ""
        param += 1.0
        with pytest.raises(TransportError) as caught:
            averager.average_parameters()
        assert averager.step == 0 and torch.equal(param, torch.full((2,), 2.0))
        return str(caught.value)

    assert "group rank 1 (global rank 1)" in LocalWorld(2).run(gone)[0]

    def other(group: Any, differ: str) -> None:
        param = torch.ones(2 + (differ == "shape") * group.rank())
        momentum = 0.5 - 0.25 * (differ == "momentum") * group.rank()
        averager = GossipModelAverager([param], 1, momentum=momentum, process_group=group)
        named = f"group rank {1 - group.rank()} .* brought other tensors"
        with pytest.raises(ValueError, match=named):
            averager.average_parameters()
        assert averager.step == 0

    for differ in ("shape", "momentum"):
        with case(differ=differ):
            LocalWorld(2).run(lambda group, differ=differ: other(group, differ))


def test_defaults_are_those_of_the_paper(world_of_one: None) -> None:
    """Kolehmainen et al. 2025, arXiv 2506.10911; gamma is that of their published code."""
    found = GossipModelAverager(model().parameters())
    assert (found.period, found.lr, found.momentum, found.gamma) == (50, 0.7, 0.5, 0.7)


def test_what_makes_no_outer_step_is_refused(world_of_one: None) -> None:
    params = list(model().parameters())
    for given, options, kind, message in [
        (params, {"period": 0}, ValueError, "period must be .* got 0"),
        (params, {"warmup_steps": -1}, ValueError, "warmup_steps must be .* got -1"),
        (params, {"lr": -0.1}, ValueError, "lr must be .* got -0.1"),
        (params, {"lr": math.inf}, ValueError, "lr must be .* got inf"),
        (params, {"momentum": 1.0}, ValueError, "momentum must be .* got 1.0"),
        (params, {"gamma": 0.0}, ValueError, "gamma must be .* got 0.0"),
        (params, {"gamma": 1.5}, ValueError, r"below 2 \(1 - momentum\^2\) = 1.5, .* got 1.5"),
        (params, {"gamma": math.nan}, ValueError, "gamma must be .* got nan"),
        ([], {}, ValueError, "no floating parameters"),
        (params, {"process_group": 2}, TypeError, "group must be"),
    ]:
        arguments: dict[str, Any] = options
        with case(message=message), pytest.raises(kind, match=message):
            GossipModelAverager(given, **arguments)
    averager = GossipModelAverager(params)
    with pytest.raises(ValueError, match="no use for further tensors"):
        averager.average_parameters(params, [torch.ones(1)])
    with pytest.raises(ValueError, match="the checkpoint's anchors have shapes"):
        averager.load_state_dict(GossipModelAverager(params[:1]).state_dict())
