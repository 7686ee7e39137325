"""The choice of a transport, and the NCCL one's calls (its collectives themselves need GPUs)."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sharding.transport import (
    NcclTransport,
    SharedMemoryTransport,
    gather_group,
    make_transport,
    nccl,
)

from .jobs import CUTS, gradient, same


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("make", [make_transport, lambda: NcclTransport(dist.group.WORLD)])
def test_alone_nothing_changes(make: Any, average: bool) -> None:
    transport = make()
    flat = gradient(0, 10, torch.float32)
    before = flat.clone()
    transport.reduce_scatter(flat, [(0, 10)], average=average).wait()
    assert transport.all_gather(flat, [(2, 5)]).future().wait() is not None
    assert same(flat, before)
    assert transport.bytes_sent == 0


@pytest.mark.usefixtures("world")
def test_refused() -> None:
    with pytest.raises(ValueError, match="no transport for cuda tensors over gloo"):
        make_transport(device="cuda")
    with pytest.raises(ValueError, match="no transport for meta tensors over no backend"):
        make_transport(device="meta")
    with pytest.raises(TypeError, match="ProcessGroup, a DeviceMesh or None, got int"):
        make_transport(7)
    with pytest.raises(ValueError, match="not a member of the group"):
        make_transport(dist.GroupMember.NON_GROUP_MEMBER)
    with pytest.raises(ValueError, match="in_flight must be at least 1, got 0"):
        make_transport(in_flight=0)
    with pytest.raises(TypeError, match="reduce_scatter sums"):
        make_transport().reduce_scatter(torch.zeros(2, dtype=torch.int32), [(0, 2)])
    with pytest.raises(ValueError, match="has one dimension|one dimension"):
        make_transport().all_gather(torch.zeros(2, 2), [(0, 2)])


def test_without_a_world() -> None:
    with pytest.raises(ValueError, match="call init_process_group first"):
        make_transport()


@pytest.mark.usefixtures("world")
def test_each_world_has_a_twin_of_its_own() -> None:
    twin = gather_group()
    assert twin is gather_group(dist.group.WORLD)
    assert isinstance(make_transport(twin), SharedMemoryTransport)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert gather_group() is not twin


class Calls:
    """Stands for torch.distributed in a world of ``terms``: adds and hands on at once."""

    def __init__(self, terms: list[Tensor], rank: int, ranges: list[tuple[int, int]]) -> None:
        self.terms, self.rank, self.ranges = terms, rank, ranges
        self.names: list[str] = []

    def _add(self, output: Tensor) -> Any:
        start, stop = self.ranges[self.rank]
        output.copy_(sum(term[start:stop] for term in self.terms))
        return SimpleNamespace(wait=lambda: None)

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, **_: Any) -> Any:
        self.names.append("reduce_scatter_single")
        assert whole.numel() == len(self.terms) * output.numel()
        assert output.data_ptr() == whole[self.rank * output.numel() :].data_ptr() or not len(whole)
        return self._add(output)

    def reduce_scatter(self, output: Tensor, pieces: list[Tensor], **_: Any) -> Any:
        self.names.append("reduce_scatter")
        assert [piece.numel() for piece in pieces] == [b - a for a, b in self.ranges]
        return self._add(output)

    def all_gather_single(self, whole: Tensor, own: Tensor, **_: Any) -> Any:
        return self.all_gather(list(whole.chunk(len(self.terms))), own, name="all_gather_single")

    def all_gather(self, pieces: list[Tensor], own: Tensor, name: str = "all_gather", **_: Any):
        self.names.append(name)
        assert own.data_ptr() == pieces[self.rank].data_ptr()
        for piece, term, (start, stop) in zip(pieces, self.terms, self.ranges, strict=False):
            piece.copy_(term[start:stop].view(torch.uint8))
        return SimpleNamespace(wait=lambda: None)


@settings(derandomize=True, max_examples=60)
@given(st.integers(2, 5), st.data())
def test_nccl_calls(size: int, data: st.DataObject) -> None:
    even = data.draw(st.booleans())
    if even:
        each, start = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 3))
        ranges = [(start + q * each, start + (q + 1) * each) for q in range(size)]
    else:
        bounds = [0, *sorted(data.draw(st.lists(st.integers(0, 30), min_size=size, max_size=size)))]
        ranges = [(bounds[q], bounds[q + 1]) for q in range(size)]
        even = len({stop - start for start, stop in ranges}) == 1
    rank = data.draw(st.integers(0, size - 1))
    numel = ranges[-1][1] + 2
    terms = [gradient(q, numel, torch.float32) for q in range(size)]
    calls = Calls(terms, rank, ranges)
    group: Any = SimpleNamespace(rank=lambda: rank, size=lambda: size)
    with pytest.MonkeyPatch.context() as patch:
        for name in (
            "reduce_scatter_single",
            "reduce_scatter",
            "all_gather_single",
            "all_gather",
        ):
            patch.setattr(nccl.dist, name, getattr(calls, name))
        transport = NcclTransport(group)
        flat = terms[rank].clone()
        transport.reduce_scatter(flat, ranges).wait()
        own = slice(*ranges[rank])
        assert torch.equal(flat[own], sum(term[own] for term in terms))
        transport.all_gather(flat, ranges).wait()
    for q, (start, stop) in enumerate(ranges):
        assert same(flat[start:stop], terms[q][start:stop])
    tail = "_single" if even else ""
    assert calls.names == [f"reduce_scatter{tail}", f"all_gather{tail}"]
    covered = 4 * (ranges[-1][1] - ranges[0][0])
    after = ranges[(rank + 1) % size]
    own_bytes = 4 * (own.stop - own.start)
    assert transport.bytes_sent == 2 * covered - own_bytes - 4 * (after[1] - after[0])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for every rank")
@pytest.mark.parametrize("cut", ["even", "all to the last", "backwards, with gaps"])
def test_nccl_sums(cut: str, tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_on_gpus, args=(2, cut, str(tmp_path / "store")), nprocs=2)


def _on_gpus(rank: int, size: int, cut: str, file: str) -> None:
    store = dist.FileStore(file, size)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device)
    ranges = CUTS[cut](1000, size)
    flat = gradient(rank, 1000, torch.float32).to(device)
    transport = make_transport(device=device)
    transport.reduce_scatter(flat, ranges).future().wait()
    make_transport(gather_group(), device).all_gather(flat, ranges).wait()
    expected = gradient(0, 1000, torch.float32) + gradient(1, 1000, torch.float32)
    for start, stop in ranges:
        assert torch.equal(flat[start:stop].cpu(), expected[start:stop])
    dist.destroy_process_group()
