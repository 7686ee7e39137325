"""Tests of the world of threads: transports, collectives, and ranks that fail."""

import functools
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from sharding.transport import GlooTransport, TransportError, make_transport
from sharding.transport.groups import gather_group, new_subgroup
from sharding.transport.local import LocalTransport, LocalWorld
from tests.choices import case, examples

SUMMED = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
TRANSPORTS = (LocalTransport, GlooTransport)
"""LocalTransport, and GlooTransport, which sends messages as it does over gloo."""


@st.composite
def cut(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    """Draw a length and a range for each rank, in any order; some ranges are empty."""
    ranks = draw(st.sampled_from([1, 2, 3, 4, 6]))
    length = draw(st.sampled_from([0, 7, 300, 300, 300]))
    ends = sorted(draw(st.lists(st.integers(0, length), min_size=2 * ranks, max_size=2 * ranks)))
    ranges = list(zip(ends[::2], ends[1::2], strict=True))
    return length, draw(st.permutations(ranges))


def own(rank: int, length: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(rank)).to(dtype)


def added(terms: list[Tensor]) -> Tensor:
    """Add terms in rank order; 16-bit terms are added in float32 and rounded once."""
    wide = terms[0].dtype in (torch.bfloat16, torch.float16)
    total = functools.reduce(torch.add, [one.float() if wide else one for one in terms])
    return total.to(terms[0].dtype)


@examples(20)
@given(cut(), st.sampled_from(SUMMED), st.booleans())
def test_sums_are_in_rank_order_whoever_sends(
    drawn: tuple[int, list[tuple[int, int]]], dtype: torch.dtype, average: bool
) -> None:
    length, ranges = drawn
    ranks = len(ranges)
    terms = [own(rank, length, dtype) for rank in range(ranks)]
    # Complex terms are divided as complex numbers, because real parts alone would round
    # differently.
    total = added([one / ranks if average else one for one in terms])
    for kind in TRANSPORTS:

        def moved(group: Any, kind: Any = kind) -> None:
            transport, rank = kind(group), group.rank()
            flat = own(rank, length, dtype)
            works = [transport.reduce_scatter(flat, ranges, average=average)]
            works[0].wait()
            span = slice(*ranges[rank])
            assert torch.equal(flat[span], total[span])
            transport.all_gather(flat, ranges).wait()
            for start, stop in ranges:
                assert torch.equal(flat[start:stop], total[start:stop])
            size = flat.element_size()
            others = sum(b - a for place, (a, b) in enumerate(ranges) if place != rank)
            back = (ranks - 1) * (ranges[rank][1] - ranges[rank][0])
            assert transport.bytes_sent == size * (others + back)

        with case(transport=kind.__name__):
            LocalWorld(ranks).run(moved)


def test_ranks_may_be_stepped_in_turn() -> None:
    """A caller that launches all works before it waits for any needs no threads."""
    world = LocalWorld(3)
    flats = [torch.tensor([1.0, 2.0, 3.0]) + rank for rank in range(3)]
    ranges = [(0, 1), (1, 3), (3, 3)]
    works = [
        LocalTransport(group).reduce_scatter(flat, ranges)
        for group, flat in zip(world.groups, flats, strict=True)
    ]
    assert flats[0].tolist() == [1.0, 2.0, 3.0]  # reduced only by wait()
    for work in works:
        work.wait()
    assert [flat.tolist() for flat in flats] == [[6.0, 2, 3], [2, 9, 12], [3, 4, 5]]


def test_what_is_written_to_while_it_is_under_way_is_an_error() -> None:
    def hasty(group: Any) -> None:
        flat = torch.zeros(4)
        work = make_transport(group).reduce_scatter(flat, [(0, 2), (2, 4)])
        flat[3] = 1.0
        work.wait()

    with pytest.raises(RuntimeError, match="the buffer was written to before"):
        LocalWorld(2).run(hasty)


def test_collectives_of_torch() -> None:
    ops = {dist.ReduceOp.SUM: 6.0, dist.ReduceOp.MAX: 3.0, dist.ReduceOp.PRODUCT: 6.0}

    def called(group: Any) -> None:
        rank = group.rank()
        for op, wanted in ops.items():
            one = torch.tensor(rank + 1.0)
            dist.all_reduce(one, op, group=group)
            assert one.item() == wanted
        one = torch.tensor(rank)
        dist.broadcast(one, group=group, group_src=2)
        every = [torch.zeros(2) for _ in range(3)]
        dist.all_gather(every, torch.full((2,), float(rank)), group=group)
        assert one.item() == 2 and torch.stack(every).tolist() == [[0, 0], [1, 1], [2, 2]]
        dist.barrier(group=group)
        told: list[Any] = [None] * 3
        dist.all_gather_object(told, {"rank": rank}, group=group)
        assert told == [{"rank": 0}, {"rank": 1}, {"rank": 2}]

    LocalWorld(3).run(called)


def test_groups_of_some_ranks() -> None:
    """Ranks are numbered within a subgroup, and each subgroup has a twin group for gathers."""

    def called(group: Any) -> float:
        odd = group.rank() % 2
        part = new_subgroup(group, [rank for rank in range(5) if rank % 2 == odd])
        twin = gather_group(part)
        assert twin is gather_group(part) and twin is not part
        assert part.rank() == group.rank() // 2
        one = torch.tensor(float(group.rank()))
        dist.all_reduce(one, group=twin)
        return one.item()

    assert LocalWorld(5).run(called) == [6.0, 4.0, 6.0, 4.0, 6.0]


def test_ddp_is_what_its_ranks_are_added_up_to() -> None:
    def called(group: Any) -> list[float]:
        ddp = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False), process_group=group)
        ddp(torch.full((1, 2), float(group.rank()))).sum().backward()
        return ddp.module.weight.grad.tolist()[0]

    assert LocalWorld(4).run(called) == [[1.5, 1.5]] * 4


def waits(group: Any) -> None:
    make_transport(group).all_gather(torch.zeros(3), [(r, r + 1) for r in range(3)]).wait()


def raises(group: Any) -> None:
    raise ValueError("of the user")


def collects(group: Any) -> None:
    dist.all_reduce(torch.zeros(1), group=group)


def receives(group: Any) -> None:
    dist.irecv(torch.zeros(1), group=group, group_src=1).wait()


@pytest.mark.parametrize("wait", [waits, collects, receives])
def test_a_rank_that_raises_ends_the_others(wait: Any) -> None:
    """If a rank raises an error, the other ranks end with that error's text.

    The caller of the world gets the original error.
    """
    seen: dict[int, str] = {}

    def called(group: Any) -> None:
        try:
            (raises if group.rank() == 1 else wait)(group)
        except RuntimeError as error:
            seen[group.rank()] = str(error)
            raise

    world = LocalWorld(3)
    with pytest.raises(ValueError, match="of the user") as raised:
        world.run(called)
    assert raised.value.__notes__[0] == "raised on rank 1 of 3"
    assert sorted(seen) == [0, 2]
    for text in seen.values():
        assert "lost group rank 1 (global rank 1), which raised ValueError: of the user" in text
    with pytest.raises(RuntimeError, match="may be out of step"):
        world.run(called)


def test_a_rank_that_does_not_come_is_named() -> None:
    for wait in (waits, collects):
        with pytest.raises(RuntimeError, match=r"lost group rank 2 .*, which had returned"):
            LocalWorld(3).run(lambda group, wait=wait: None if group.rank() == 2 else wait(group))


def test_ranks_that_are_out_of_step_are_named() -> None:
    with pytest.raises(RuntimeError, match="out of step: group rank . .*global rank .* is at"):
        LocalWorld(2).run(lambda group: (collects, dist.barrier)[group.rank()](group))


def test_ranks_that_wait_for_one_another_are_told_after_a_while() -> None:
    def called(group: Any) -> None:
        dist.irecv(torch.zeros(1), group=group, group_src=1 - group.rank()).wait()

    with pytest.raises(TransportError, match="waited 0.1 s for group rank . .*, in vain"):
        LocalWorld(2, seconds=0.1).run(called)


def test_ranks_that_wait_for_something_else_are_shown() -> None:
    never = threading.Event()
    try:
        with pytest.raises(RuntimeError, match="ranks hang:\nrank 0:\n(.|\n)*never.wait"):
            LocalWorld(1, seconds=0.1).run(lambda group: never.wait(300))
    finally:
        never.set()


def test_a_world_goes_on_from_call_to_call() -> None:
    world = LocalWorld(2)
    flats = world.run(lambda group: torch.full((2,), float(group.rank())))
    for _ in range(2):
        world.run(lambda group: dist.all_reduce(flats[group.rank()], group=group))
    assert [flat.tolist() for flat in flats] == [[2.0, 2.0], [2.0, 2.0]]


class SlowEnd:
    """Object that takes a while to delete."""

    def __del__(self) -> None:
        time.sleep(0.3)


def test_no_thread_of_a_rank_runs_after_the_call() -> None:
    """Python aborts a program that ends while such a thread deletes tensors."""
    own, threads = threading.local(), list[threading.Thread]()

    def run(group: Any) -> None:
        threads.append(threading.current_thread())
        own.value = SlowEnd()  # deleted at the end of the thread

    LocalWorld(2).run(run)
    assert [thread.is_alive() for thread in threads] == [False, False]


def test_what_no_world_is() -> None:
    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        LocalWorld(0)
    with pytest.raises(ValueError, match="seconds must be a number above 0"):
        LocalWorld(1, seconds=0.0)
