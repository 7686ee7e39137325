"""Tests of sending buckets to owners and back, on ranks of one process."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hooks.buckets import BucketPosition, gradient_views
from hooks.zero.bucket import BucketCache, ZeroBucket, start_reduction
from sharding import ParameterSpec, Pieces, ShardPlan, plan
from sharding.transport.local import LocalTransport, LocalWorld
from sharding.transport.local_group import LocalGroup
from sharding.transport.protocol import Work
from sharding.zero import coalescing
from sharding.zero.gather import plan_gather, start_gather
from sharding.zero.parameter_memory import ParameterMemory
from sharding.zero.params import specs_of_groups
from tests.choices import examples


class Shape(NamedTuple):
    """Shape, layout and owners of a drawn parameter."""

    size: tuple[int, ...]
    layout: str
    cuts: tuple[int, ...]
    """Ends of all pieces but the last. Only a contiguous parameter is cut."""
    ranks: tuple[int, ...]
    """Owners of the pieces."""


@st.composite
def shapes(draw: st.DrawFn, ranks: int) -> Shape:
    layout = draw(st.sampled_from(["contiguous", "contiguous", "transposed", "sliced"]))
    size = (
        draw(st.sampled_from([(), (0, 3), (1,), (7,), (40,), (5, 9)]))
        if layout == "contiguous"
        else draw(st.sampled_from([(4, 6), (5, 9), (2, 2)]))
    )
    numel = torch.Size(size).numel()
    cuts = draw(st.lists(st.integers(1, max(numel - 1, 1)), max_size=3, unique=True))
    cuts = sorted(cut for cut in cuts if cut < numel and layout == "contiguous")
    owners = draw(st.lists(st.integers(0, ranks - 1), min_size=4, max_size=4))
    return Shape(size, layout, tuple(cuts), tuple(owners))


@st.composite
def worlds(draw: st.DrawFn) -> tuple[int, list[Shape], torch.dtype, bool]:
    ranks = draw(st.integers(1, 4))
    found = draw(st.lists(shapes(ranks), min_size=1, max_size=6))
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.complex64]))
    return ranks, found, dtype, draw(st.booleans())


def made(shape: Shape, dtype: torch.dtype) -> Tensor:
    if shape.layout == "transposed":
        return torch.zeros(shape.size[::-1], dtype=dtype).t()
    if shape.layout == "sliced":
        return torch.zeros(shape.size[0], 2 * shape.size[1], dtype=dtype)[:, ::2]
    return torch.zeros(shape.size, dtype=dtype)


def planned(ranks: int, found: Sequence[Shape], dtype: torch.dtype) -> ShardPlan:
    specs, rows = [], []
    for place, shape in enumerate(found):
        spec = ParameterSpec(f"p{place}", shape.size, dtype)
        ends = [0, *shape.cuts, spec.numel]
        specs.append(spec)
        rows += [
            (place, start, stop, rank)
            for start, stop, rank in zip(ends, ends[1:], shape.ranks, strict=False)
        ]
    return ShardPlan(ranks, tuple(specs), Pieces(*zip(*rows, strict=True)))


ALONE = BucketPosition(0, last=True, backward=0)
"""Position of the only bucket of an iteration."""


class FakeBucket(NamedTuple):
    """Stand-in for a GradBucket, with a buffer and its parameters."""

    flat: Tensor
    params: list[Tensor]

    def buffer(self) -> Tensor:
        return self.flat

    def parameters(self) -> list[Tensor]:
        return self.params


def bucket_of(
    rank: int,
    found: Sequence[Shape],
    dtype: torch.dtype,
    plan: ShardPlan,
    *,
    as_real: bool,
) -> ZeroBucket:
    """Return the bucket of a rank, with random gradients and parameters of -1."""
    params = [made(shape, dtype) for shape in found]
    factor = 2 if dtype.is_complex and as_real else 1
    count = sum(param.numel() for param in params) * factor
    real = dtype.to_real() if factor == 2 else dtype
    chance = torch.Generator().manual_seed(rank)
    flat = torch.randn(count, generator=chance, dtype=real)
    for param in params:
        param.fill_(-1)
    paths = {id(param): f"p{place}" for place, param in enumerate(params)}
    return BucketCache(plan, paths, plan.world_size).get(FakeBucket(flat, params), ALONE)


def gathering(
    transport: LocalTransport, plan: ShardPlan, bucket: ZeroBucket, memory: ParameterMemory
) -> Work:
    """Start gathering the parameters of a bucket."""
    messages = plan_gather(memory, plan, bucket.paths, transport.size)
    return start_gather(memory, messages, (), {torch.device("cpu"): transport}, in_flight=None)


def storage_id(plan: ShardPlan, bucket: ZeroBucket, *, in_buffers: bool = False) -> ParameterMemory:
    params = dict(zip(bucket.paths, bucket.params, strict=True))
    return ParameterMemory(params, plan, in_buffers=in_buffers)


@examples(25)
@given(worlds(), st.sampled_from([1, 8, 1000]), st.booleans())
def test_each_element_once(
    drawn: tuple[int, list[Shape], torch.dtype, bool], direct: int, in_buffers: bool
) -> None:
    with mock.patch.object(coalescing, "DIRECT", direct):
        _check_moves(drawn, in_buffers)


def _check_moves(drawn: tuple[int, list[Shape], torch.dtype, bool], in_buffers: bool) -> None:
    ranks, found, dtype, as_real = drawn
    plan = planned(ranks, found, dtype)
    transports = [LocalTransport(group) for group in LocalWorld(ranks).groups]
    buckets = [bucket_of(rank, found, dtype, plan, as_real=as_real) for rank in range(ranks)]
    memories = [storage_id(plan, one, in_buffers=in_buffers) for one in buckets]
    terms = [[grad.clone() for grad in one.gradients] for one in buckets]
    reductions = [
        start_reduction(transport, one) for transport, one in zip(transports, buckets, strict=True)
    ]
    for wait in reductions:
        wait()
    for rank, one in enumerate(buckets):
        _check_owned(plan, rank, one, terms)
        _step(plan, rank, one)
    gathers = [
        gathering(transport, plan, bucket, memory)
        for transport, bucket, memory in zip(transports, buckets, memories, strict=True)
    ]
    for one in gathers:
        one.wait()
    _check_gathered(plan, buckets)
    numel = sum(spec.numel for spec in plan.specs)
    sent = sum(transport.bytes_sent for transport in transports)
    assert sent == 2 * (ranks - 1) * numel * dtype.itemsize


def _check_owned(plan: ShardPlan, rank: int, bucket: ZeroBucket, terms: list[list[Tensor]]) -> None:
    owned = bucket.owned_gradients(rank)
    assert {(p, a, b) for p, spans in owned.items() for a, b, _ in spans} == {
        (one.path, one.start, one.stop) for one in plan.owned(rank)
    }
    for path, spans in owned.items():
        place = plan.index_of(path)
        total = functools.reduce(
            torch.add,
            [_part_of_mean(own[place], len(terms), bucket.buffer.is_complex()) for own in terms],
        )
        for start, stop, gradient in spans:
            assert torch.equal(gradient.reshape(-1), total.reshape(-1)[start:stop])


def _part_of_mean(term: Tensor, count: int, as_complex: bool) -> Tensor:
    """Divide a gradient as DDP divides its bucket, which may hold complex values as real ones."""
    if term.is_complex() and not as_complex:
        return torch.view_as_complex(torch.view_as_real(term) / count)
    return term / count


def _step(plan: ShardPlan, rank: int, bucket: ZeroBucket) -> None:
    """Write the index of each owned element into the parameters."""
    for one in plan.owned(rank):
        param = bucket.params[one.parameter]
        flat = param.reshape(-1).clone()
        flat[one.start : one.stop] = torch.arange(one.start, one.stop).to(flat.dtype)
        param.copy_(flat.view(param.shape))


def _check_gathered(plan: ShardPlan, buckets: Sequence[ZeroBucket]) -> None:
    for bucket in buckets:
        for spec, param in zip(plan.specs, bucket.params, strict=True):
            wanted = torch.arange(spec.numel).to(param.dtype).view(param.shape)
            assert torch.equal(param, wanted)


class Recorded(LocalTransport):
    """Transport that records the buffers it sends."""

    def __init__(self, group: LocalGroup) -> None:
        super().__init__(group)
        self.flats: list[Tensor] = []

    def _launch(self, what: str, flat: Tensor, *more: Any) -> Work:
        self.flats.append(flat)
        return super()._launch(what, flat, *more)


def test_a_gradient_of_another_dtype_is_refused() -> None:
    param = torch.zeros(4, dtype=torch.float32)
    plan = planned(1, [Shape((4,), "contiguous", (), (0,))], torch.float32)
    bucket = FakeBucket(torch.zeros(4, dtype=torch.bfloat16), [param])
    with pytest.raises(ValueError, match=r"'p0', of torch.float32, in torch.bfloat16"):
        BucketCache(plan, {id(param): "p0"}, 1).get(bucket, ALONE)


def test_parameters_of_others_are_left_to_them() -> None:
    """Other parameters in the bucket only change the offsets of those that the plan has."""
    mine, other = torch.zeros(2, 3), torch.zeros(5)
    plan = planned(1, [Shape((2, 3), "contiguous", (), (0,))], torch.float32)
    flat = torch.arange(11.0)
    bucket = BucketCache(plan, {id(mine): "p0"}, 1).get(FakeBucket(flat, [other, mine]), ALONE)
    views = gradient_views(flat, [other, mine])
    assert torch.equal(bucket.gradients[0], views[1])
    assert bucket.members[0].offset == 5
    assert bucket.owned_gradients(0, without=["p0"]) == {}


def test_more_coalesced_messages_than_are_under_way() -> None:
    """Large sets of parameters take several messages, and only one is in flight at once."""
    count = 3 * coalescing.MAX_COALESCED // 50_000

    def gathered(group: Any) -> list[list[float]]:
        params = {
            f"p{number}": nn.Parameter(torch.full((50_000,), float(group.rank())))
            for number in range(count)
        }
        specs = specs_of_groups(params, [{"params": list(params.values())}], ["pointwise"])
        shares = plan(specs, 2)
        memory = ParameterMemory(params, shares, in_buffers=False)
        messages = plan_gather(memory, shares, params)
        assert len(messages) > 2 and all(one.places for one in messages)
        assert all(one.ranges[-1][1] <= coalescing.MAX_COALESCED for one in messages)
        transport = Recorded(group)
        before = [param._version for param in params.values()]
        transports = {torch.device("cpu"): transport}
        start_gather(memory, messages, list(params), transports, in_flight=1).wait()
        assert len(transport.flats) == len(messages)
        assert all(p._version > b for p, b in zip(params.values(), before, strict=True))
        owners = [shares.owners(path)[0].ranks[0] for path in params]
        return [
            [float(owner), *param[[0, -1]].tolist()]
            for owner, param in zip(owners, params.values(), strict=True)
        ]

    for found in LocalWorld(2).run(gathered):
        assert all(owner == first == last for owner, first, last in found)
        assert {owner for owner, *_ in found} == {0.0, 1.0}
