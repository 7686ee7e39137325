"""Tests of the choice of a transport, of one rank alone, and of refused arguments."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sharding.transport import (
    NcclTransport,
    SharedMemoryTransport,
    gather_group,
    make_transport,
)
from tests.choices import case
from tests.transport.buffers import gradient, same


@pytest.mark.usefixtures("world_of_one")
def test_alone_nothing_changes() -> None:
    makers: list[Callable[[], Any]] = [make_transport, lambda: NcclTransport(dist.group.WORLD)]
    for make in makers:
        for average in (False, True):
            transport = make()
            flat = gradient(0, 10, torch.float32)
            before = flat.clone()
            with case(transport=type(transport), average=average):
                transport.reduce_scatter(flat, [(0, 10)], average=average).wait()
                transport.all_gather(flat, [(2, 5)]).wait()
                assert same(flat, before)
                assert transport.bytes_sent == 0


@pytest.mark.usefixtures("world_of_one")
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
    with pytest.raises(ValueError, match="one dimension"):
        make_transport().all_gather(torch.zeros(2, 2), [(0, 2)])


def test_without_a_world() -> None:
    with pytest.raises(ValueError, match="call init_process_group first"):
        make_transport()


@pytest.mark.usefixtures("world_of_one")
def test_each_world_has_a_twin_of_its_own() -> None:
    twin = gather_group()
    assert twin is gather_group(dist.group.WORLD)
    assert isinstance(make_transport(twin), SharedMemoryTransport)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert gather_group() is not twin
