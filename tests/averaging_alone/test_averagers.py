"""Tests of model averagers: their means, the steps that average, and refusals."""

import functools
from functools import reduce
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hooks import (
    AveragingSchedule,
    HierarchicalModelAverager,
    PeriodicModelAverager,
    ScheduledModelAverager,
)
from hooks.averaging.rank_means import RankMeans
from sharding.transport import TransportError
from sharding.transport.local import LocalWorld
from tests.choices import case

from .training import mean_of, model, same, train, values

SHAPES = [(5, 3), (1,), (), (0, 2), (7,)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]


def tensors(rank: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    chance = torch.Generator().manual_seed(1 + rank + 50 * seed)
    made = [torch.randn(shape, generator=chance, dtype=torch.float64) for shape in SHAPES]
    return [one.to(dtype) for one in made]


def means(world: LocalWorld, dtype: torch.dtype, **options: Any) -> list[list[Tensor]]:
    return world.run(
        lambda group: RankMeans(group, **options).launch(tensors(group.rank(), dtype))()
    )


def test_means_are_those_of_float64_within_their_ulps() -> None:
    for size in (1, 2, 3, 4, 7):
        for dtype in DTYPES:
            found = means(LocalWorld(size), dtype)
            given_ = [[one.to(torch.complex128) for one in tensors(r, dtype)] for r in range(size)]
            for place in range(len(SHAPES)):
                terms = torch.stack([one[place] for one in given_])
                # size - 1 additions, a division, and one more rounding for 16 bits
                bound = (size + 1) * torch.finfo(dtype).eps * terms.abs().mean(0)
                with case(size=size, dtype=dtype, place=place):
                    for rank in found:
                        assert rank[place].dtype == dtype and rank[place].shape == SHAPES[place]
                        off = (rank[place].to(torch.complex128) - terms.mean(0)).abs()
                        assert (off <= bound).all()


def test_sums_are_in_rank_order() -> None:
    size = 5
    want = reduce(torch.add, [tensors(rank, torch.float32)[0] for rank in range(size)]) / size
    for rank in means(LocalWorld(size), torch.float32):
        assert torch.equal(rank[0], want)


@functools.cache
def means_of_one_bucket(size: int, dtype: torch.dtype) -> list[list[Tensor]]:
    return means(LocalWorld(size), dtype)


@given(st.integers(1, 200), st.integers(2, 5), st.sampled_from(DTYPES), st.booleans())
def test_any_bucket_size_gives_the_bits_of_one_bucket(
    bucket_bytes: int, size: int, dtype: torch.dtype, background: bool
) -> None:
    whole = means_of_one_bucket(size, dtype)
    cut = means(LocalWorld(size), dtype, bucket_bytes=bucket_bytes, background=background)
    for one, other in zip(whole, cut, strict=True):
        assert same(one, other)


def test_large_numbers_of_float16_have_a_mean() -> None:
    big = torch.full((3,), 60_000.0, dtype=torch.float16)
    for rank in LocalWorld(4).run(lambda group: RankMeans(group).launch([big])()):
        assert torch.equal(rank[0], big)


def averaged(group: Any, steps: int, averager: Any) -> list[list[Tensor]]:
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for step in range(steps):
        train(module, optimizer, group.rank(), [step])
        averager.average_parameters(module.parameters())
        seen.append(values(module))
    return seen


def test_groups_are_of_neighbours_and_the_last_may_be_smaller() -> None:
    schedule = AveragingSchedule((2, 4), (2, None))
    found = LocalWorld(5).run(lambda g: averaged(g, 4, ScheduledModelAverager(schedule, g)))
    after = [rank[2] for rank in found]  # step 2 averages at level 0
    assert same(after[0], after[1]) and same(after[2], after[3])
    assert not same(after[1], after[2]) and not same(after[3], after[4])
    everybody = [rank[0] for rank in found]
    assert all(same(everybody[0], one) for one in everybody)


def test_parameters_without_gradients_are_averaged_too() -> None:
    """torch leaves such parameters out on one rank, so the buffers of its ranks do not match."""

    def step(group: Any) -> list[Tensor]:
        params = [nn.Parameter(torch.full((2,), float(group.rank()))) for _ in range(2)]
        if group.rank() == 0:
            params[0].grad = torch.ones(2)
        averager = PeriodicModelAverager(2, 0, group)
        averager.average_parameters([{"params": params[:1]}, {"params": params[1:]}])
        assert averager.step == 1  # one call is one step, for any number of groups
        return [param.detach() for param in params]

    for rank in LocalWorld(3).run(step):
        assert all(torch.equal(param, torch.ones(2)) for param in rank)


def test_a_delayed_mean_keeps_the_steps_made_meanwhile() -> None:
    delay, steps = 2, 5

    def delayed(group: Any) -> list[list[Tensor]]:
        averager = ScheduledModelAverager(AveragingSchedule(4), group, delay=delay)
        return averaged(group, steps, averager)

    found = LocalWorld(3).run(delayed)
    alone = [rank[:delay] for rank in found]  # nothing is applied before the delay ends
    for rank in range(3):
        module = model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        want = train(module, optimizer, rank, range(delay + 1))
        for step in range(delay):
            assert same(alone[rank][step], want[step])
        mean = mean_of([one[0] for one in found])
        for param, sent, middle, after in zip(
            want[delay], want[0], mean, found[rank][delay], strict=True
        ):
            expected = param.double() + middle - sent.double()
            torch.testing.assert_close(after.double(), expected, rtol=1e-5, atol=1e-6)


def test_ranks_that_bring_other_tensors_are_named() -> None:
    def step(group: Any) -> str:
        params = [nn.Parameter(torch.ones(2 + (group.rank() == 1)))]
        averager = PeriodicModelAverager(2, 0, group)
        with pytest.raises(ValueError, match="brought other tensors") as caught:
            averager.average_parameters(params)
        assert torch.equal(params[0], torch.ones(2 + (group.rank() == 1)))
        assert averager.step == 0
        return str(caught.value)

    first, second, _ = LocalWorld(3).run(step)
    assert "group rank 1 (global rank 1) brought other tensors to average" in first
    assert "group rank 0 (global rank 0), group rank 2 (global rank 2)" in second


def test_a_rank_that_does_not_come_is_named() -> None:
    def step(group: Any) -> str:
        if group.rank() == 1:
            return ""
        averager = PeriodicModelAverager(2, 0, group)
        with pytest.raises(TransportError) as caught:
            averager.average_parameters([nn.Parameter(torch.ones(2))])
        return str(caught.value)

    assert "rank 1" in LocalWorld(2).run(step)[0]


def test_what_is_no_averager_is_refused(world_of_one: None) -> None:
    fits = AveragingSchedule((2, 4), (1, None))
    for build, kind, message in [
        (lambda: PeriodicModelAverager(0), ValueError, "periods must be"),
        (lambda: PeriodicModelAverager(2, -1), ValueError, "warmup must be"),
        (HierarchicalModelAverager, ValueError, "a group size for each period"),
        (lambda: HierarchicalModelAverager({0: 1}), ValueError, "from 1 on"),
        (lambda: HierarchicalModelAverager({4: 1, 2: 1}), ValueError, "must ascend"),
        (lambda: HierarchicalModelAverager({2: 3}), ValueError, "last group size is 3, but 1 "),
        (lambda: ScheduledModelAverager(4), TypeError, "must be an AveragingSchedule, got"),
        (lambda: ScheduledModelAverager(fits, delay=2), ValueError, "from 0 to 1, got 2"),
        (lambda: ScheduledModelAverager(fits, delay=-1), ValueError, "got -1"),
        (lambda: ScheduledModelAverager(fits, bucket_bytes=0), ValueError, "bucket_bytes must be"),
    ]:
        with case(message=message), pytest.raises(kind, match=message):
            build()
    with pytest.warns(UserWarning, match="period 1"):
        averager = PeriodicModelAverager(1)
    with pytest.raises(NotImplementedError, match="takes parameters or parameter groups"):
        averager.average_parameters(["weight"])
    with pytest.raises(TypeError, match=r"tensor 0 is of torch.int64, whose numbers have no mean"):
        averager.average_parameters([], [torch.ones(2, dtype=torch.int64)])
    assert averager.step == 0 and averager.process_group is dist.group.WORLD
