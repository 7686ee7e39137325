"""All ranks in one process, without a process group: any plan gives what one process gives."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from functional_optim import Optimizer, adamw, sgd
from functional_optim.recipe import OptimizerRecipe
from sharding import ShardPlan, plan
from sharding.transport import Range
from sharding.zero.gather import gather, route_of
from sharding.zero.memory import Memory
from sharding.zero.params import specs_of_groups
from sharding.zero.route import PACK
from sharding.zero.shard import Shard

from .jobs import differing

SLOW = settings(
    derandomize=True,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
SIZES = [(), (0,), (1,), (5, 3), (64,), (257,), (40, 50), (300, 230)]
DTYPES = [torch.float32, torch.float64, torch.complex64]


class Sent(NamedTuple):
    """What one rank launched."""

    flat: Tensor
    ranges: tuple[Range, ...]


class World:
    """The operations of all ranks, which meet by their number."""

    def __init__(self, size: int) -> None:
        self.sent: list[list[Sent]] = [[] for _ in range(size)]


class Transport:
    """One rank's side of it; it copies when it is waited for."""

    rank_ordered = True
    bytes_sent = 0

    def __init__(self, world: World, rank: int, size: int) -> None:
        self.world, self.rank, self.size = world, rank, size

    def all_gather(self, flat: Tensor, ranges: tuple[Range, ...]) -> "Work":
        taken = sorted(one for one in ranges if one[0] < one[1])
        assert all(a[1] <= b[0] for a, b in pairwise(taken))
        assert len(ranges) == self.size and flat.is_contiguous() and flat.dim() == 1
        self.world.sent[self.rank].append(Sent(flat, ranges))
        return Work(self.world, len(self.world.sent[self.rank]) - 1, self.rank)


class Work:
    def __init__(self, world: World, number: int, rank: int) -> None:
        self.world, self.number, self.rank = world, number, rank

    def wait(self) -> None:
        own = self.world.sent[self.rank][self.number]
        for other in (sent[self.number] for sent in self.world.sent):
            assert other.ranges == own.ranges and other.flat.shape == own.flat.shape
        for rank, (start, stop) in enumerate(own.ranges):
            own.flat[start:stop] = self.world.sent[rank][self.number].flat[start:stop]


class Rank(NamedTuple):
    """What one rank has."""

    params: dict[str, Tensor]
    memory: Memory
    shard: Shard
    transports: Mapping[torch.device, Any]


class Case(NamedTuple):
    shapes: list[tuple[int, ...]]
    dtypes: list[torch.dtype]
    turned: list[bool]
    groups: list[int]
    missing: list[list[bool]]
    ranks: int
    policy: str
    views: bool


@st.composite
def cases(draw: st.DrawFn) -> Case:
    count = draw(st.integers(1, 7))

    def each(strategy: st.SearchStrategy[Any]) -> Any:
        return draw(st.lists(strategy, min_size=count, max_size=count))

    return Case(
        each(st.sampled_from(SIZES)),
        each(st.sampled_from(DTYPES)),
        each(st.booleans()),
        sorted(each(st.integers(0, 1))),
        [each(st.booleans()) for _ in range(3)],
        draw(st.integers(1, 5)),
        draw(st.sampled_from(["greedy", "balanced", "contiguous", "elements"])),
        draw(st.booleans()),
    )


def made(case: Case) -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(7)
    found: dict[str, Tensor] = {}
    for number, (shape, dtype) in enumerate(zip(case.shapes, case.dtypes, strict=True)):
        value = torch.randn(shape, generator=chance, dtype=torch.float64).to(dtype)
        if case.turned[number] and value.dim() > 1:
            value = value.t().contiguous().t()  # in another order than its shape
        found[f"p{number}"] = nn.Parameter(value)
    return found


def groups_of(params: dict[str, Tensor], case: Case, optimizer: Optimizer) -> list[dict[str, Any]]:
    found = [{**optimizer.hyper, "params": [], "lr": rate} for rate in (0.1, 0.02)]
    for param, group in zip(params.values(), case.groups, strict=True):
        found[group]["params"].append(param)
    return found


def ranks_of(
    case: Case, optimizer: Optimizer, executor: str | None
) -> tuple[list[Rank], ShardPlan]:
    world = World(case.ranks)
    found: list[Rank] = []
    for rank in range(case.ranks):
        params = made(case)
        groups = groups_of(params, case, optimizer)
        specs = specs_of_groups(params, groups, "pointwise")
        options = {"mixed": True} if case.policy == "elements" else {}
        shares = plan(specs, case.ranks, case.policy, **options)
        memory = Memory(params, shares, in_buffers=case.views)
        shard = Shard(OptimizerRecipe(optimizer, executor), memory, shares, rank)
        shard.complete(groups)
        transport = Transport(world, rank, case.ranks)
        found.append(Rank(params, memory, shard, {torch.device("cpu"): transport}))
    return found, shares


def check(case: Case, optimizer: Optimizer, executor: str | None) -> None:
    ranks, shares = ranks_of(case, optimizer, executor)
    twin = {name: param.detach().clone() for name, param in made(case).items()}
    stepper = optimizer
    for name, group in zip(twin, case.groups, strict=True):
        stepper = stepper.override((name,), lr=(0.1, 0.02)[group])
    state = stepper.init(twin)
    for number, missing in enumerate(case.missing):
        chance = torch.Generator().manual_seed(number)
        grads: dict[str, Any] = {}
        for (name, param), absent in zip(twin.items(), missing, strict=True):
            value = torch.randn(param.shape, generator=chance, dtype=torch.float64)
            grads[name] = None if absent else torch.empty_like(param).copy_(value)
        for rank in ranks:
            for name, param in rank.params.items():
                param.grad = None if grads[name] is None else grads[name].clone()
            groups = groups_of(rank.params, case, optimizer)
            rank.shard.step(rank.shard.of_grads(), groups)
        works = [
            gather(rank.memory, route_of(rank.memory, shares, twin), list(twin), rank.transports)
            for rank in ranks
        ]
        for work in works:
            work.wait()
        twin, state = stepper.update(twin, grads, state)
        for rank in ranks:
            assert differing(rank.params, twin) == []


@SLOW
@given(cases())
def test_any_plan_is_one_process(case: Case) -> None:
    check(case, adamw(), None)


@SLOW
@given(cases(), st.sampled_from(["reference", "blocked", "script"]))
def test_any_exact_executor_is_one_process(case: Case, executor: str) -> None:
    check(case, sgd(momentum=0.9, nesterov=True), executor)


def test_many_packs() -> None:
    """More small parameters than one pack holds, and more packs than are under way at once."""
    count = 3 * PACK // 50_000
    params = {f"p{number}": nn.Parameter(torch.full((50_000,), 1.0)) for number in range(count)}
    specs = specs_of_groups(params, [{"params": list(params.values())}], "pointwise")
    shares = plan(specs, 1)
    memory = Memory(params, shares, in_buffers=False)
    route = route_of(memory, shares, params)
    assert len(route.packs) > 2 and not route.direct
    assert all(pack.length <= PACK for pack in route.packs)
    world = World(1)
    transports: Any = {torch.device("cpu"): Transport(world, 0, 1)}
    before = [param._version for param in params.values()]
    gather(memory, route, list(params), transports).wait()
    assert len(world.sent[0]) == len(route.packs)
    assert all(p._version > b for p, b in zip(params.values(), before, strict=True))


@pytest.mark.parametrize("policy", ["greedy", "balanced", "contiguous", "elements"])
def test_views_make_one_message_for_each_buffer(policy: str) -> None:
    chance = torch.Generator().manual_seed(1)
    sizes = torch.randint(1, 90_000, (30,), generator=chance).tolist()
    params = {f"p{number}": nn.Parameter(torch.ones(size)) for number, size in enumerate(sizes)}
    specs = specs_of_groups(params, [{"params": list(params.values())}], "pointwise")
    shares = plan(specs, 4, policy)
    route = route_of(Memory(params, shares, in_buffers=True), shares, params)
    assert len(route.direct) == 1 and not route.packs
    covered = sum(stop - start for start, stop in route.direct[0].ranges)
    assert covered == sum(sizes)
