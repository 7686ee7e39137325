"""Jobs of the ranks: exchanges of buffers that differ on every rank, compared with one process."""

import functools
import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh

from sharding.transport import GlooTransport, gather_group, groups, make_transport
from sharding.transport.groups import GroupRank, global_rank, new_subgroup, ranks_of
from tests.ddp import through_memory

from .buffers import CUTS, gradient, reduced, same


def exchange(name: str, arguments: dict[str, Any], memory: bool) -> dict[str, Any]:
    """Run one of the functions below, with all operations in memory or none."""
    with through_memory.through_memory() if memory else nullcontext() as seen:
        found = globals()[name](**arguments)
    return {"found": found, "operations": seen.operations if seen else 0}


def sums(cases: Sequence[dict[str, Any]], n: int = 1009) -> dict[str, list[str]]:
    """Compare reduce_scatter and all_gather with sums of one process; return the errors by case."""
    transport = make_transport()
    wrong = {str(one): _sum(transport, n=n, **one) for one in cases}
    return {name: found for name, found in wrong.items() if found}


def _sum(transport: Any, *, n: int, dtype: str, cut: str, average: bool) -> list[str]:
    rank, size = transport.rank, transport.size
    kind = getattr(torch, dtype)
    ranges = CUTS[cut](n, size)
    terms = [gradient(q, n, kind) for q in range(size)]
    added = [term / size if average else term for term in terms]
    expected = reduced(added)
    flat = gradient(rank, n, kind)
    transport.reduce_scatter(flat, ranges, average=average).wait()
    own = slice(*ranges[rank])
    right = {"own": same(flat[own], expected[own]), "rank ordered": transport.rank_ordered}
    gaps = torch.ones(n, dtype=torch.bool)
    for start, stop in ranges:
        gaps[start:stop] = False
    right["gaps"] = same(flat[gaps], terms[rank][gaps])
    transport.all_gather(flat, ranges).wait()
    right["gathered"] = same(flat[~gaps], expected[~gaps])
    # The sum must differ in another order, or with rounding after every term.
    narrow = functools.reduce(operator.add, added)
    other = reduced(added[::-1]) if same(narrow, expected) else narrow
    right["shows"] = size == 2 or not same(expected, other)
    return [name for name, well in right.items() if not well]


def layouts(n: int = 1500) -> bool:
    """Return True if the sums are equal for all sizes of buckets."""
    rank, size = dist.get_rank(), dist.get_world_size()
    transport = make_transport()
    found = []
    for bucket in (n, 500, 64, 299):
        flat = gradient(rank, n, torch.float32)
        pieces = flat.split(bucket)
        works = [(piece, CUTS["even"](piece.numel(), size)) for piece in pieces]
        pending = [transport.reduce_scatter(piece, ranges) for piece, ranges in works]
        for work in reversed(pending):  # not in the order of the launches
            work.wait()
        for piece, ranges in works:
            transport.all_gather(piece, ranges).wait()
        found.append(flat)
    return all(same(one, found[0]) for one in found)


def beside_ddp() -> bool:
    """Return True if the mean of two ranks is DDP's, bit for bit. Two terms have only one order."""
    rank, size, n = dist.get_rank(), dist.get_world_size(), 4099
    flat = gradient(rank, n, torch.float32)

    class Bucket:
        """Stand-in for a GradBucket, with the methods that ``allreduce_hook`` calls."""

        def buffer(self) -> Tensor:
            return theirs

    theirs = flat.clone()
    allreduce_hook(None, Bucket()).wait()
    transport = make_transport()
    ranges = CUTS["even"](n, size)
    transport.reduce_scatter(flat, ranges, average=True).wait()
    transport.all_gather(flat, ranges).wait()
    return same(flat, theirs)


def more_than_under_way() -> dict[str, Any]:
    """Launch more operations than ``in_flight`` allows, and wait twice for one of them."""
    rank, size, n = dist.get_rank(), dist.get_world_size(), 300
    transport = GlooTransport(dist.group.WORLD, in_flight=2)
    flats = [gradient(rank, n, torch.float32, seed) for seed in range(9)]
    ranges = CUTS["even"](n, size)
    works = [transport.reduce_scatter(flat, ranges) for flat in flats]
    scratch = transport.scratch.allocated_bytes
    own = slice(*ranges[rank])
    right = []
    for seed, (flat, work) in enumerate(zip(flats, works, strict=True)):
        work.wait()
        expected = reduced([gradient(q, n, torch.float32, seed) for q in range(size)])
        right.append(same(flat[own], expected[own]))
    one = (size - 1) * (own.stop - own.start) * 4
    return {"right": all(right), "scratch": scratch / one, "again": works[0].wait() is None}


def other_dtypes() -> bool:
    """Return True if a gather copies tensors of every dtype."""
    rank, size = dist.get_rank(), dist.get_world_size()
    transport = make_transport()
    right = []
    for dtype in (torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64):
        whole = torch.arange(37).remainder(2 if dtype is torch.bool else 100).to(dtype)
        ranges = CUTS["even"](37, size)
        flat = torch.zeros_like(whole)
        flat[slice(*ranges[rank])] = whole[slice(*ranges[rank])]
        transport.all_gather(flat, ranges).wait()
        right.append(same(flat, whole))
    return all(right)


def subgroup(ranks: list[int], n: int = 501) -> dict[str, Any] | None:
    """Use a group whose group ranks differ from the global ranks; only members take part."""
    others = dist.new_group([0, 1])  # so that ranks know different numbers of groups
    group = dist.new_group(ranks)
    if dist.get_rank() not in ranks:
        return None
    assert isinstance(group, dist.ProcessGroup)
    rank, size = dist.get_rank(group), len(ranks)
    transport = make_transport(group)
    ranges = [(0, 100), (100, n)]
    flat = gradient(dist.get_rank(), n, torch.float32)
    transport.reduce_scatter(flat, ranges, average=True).wait()
    expected = reduced([gradient(q, n, torch.float32) / size for q in ranks])
    own = slice(*ranges[rank])
    seen = {"own": same(flat[own], expected[own]), "rank": transport.rank}
    twin = gather_group(group)
    gathers = make_transport(twin)
    gathers.all_gather(flat, ranges).wait()
    seen["gathered"] = same(flat, expected)
    seen["twin"] = [
        twin is not group,
        twin is gather_group(group),
        ranks_of(twin) == ranks,
        gathers.rank == rank,
    ]
    total = torch.tensor(float(rank))
    dist.all_reduce(total, group=twin)
    seen["sum"] = total.item()
    # In a part of the part, ranks have different numbers in the part, the group and the world.
    last = new_subgroup(twin, ranks[1:]) if rank else new_subgroup(twin, ranks[:1])
    seen["part"] = [ranks_of(last), last.rank(), global_rank(last, GroupRank(0))]
    assert others is not None
    return seen


def groups_of_one(by_torch: bool = False) -> list[bool]:
    """Make twin groups after groups were destroyed: torch then reuses counts, and so names."""
    other = mock.patch.object(groups, "_device_of_each_backend", return_value={"cpu": "another"})
    with other if by_torch else nullcontext():
        return _groups_of_one()


def _groups_of_one() -> list[bool]:
    rank = dist.get_rank()
    others = [dist.new_group([0, 1, 2, 3]) for _ in range(3)]
    own = [dist.new_group([one]) for one in range(4)][rank]
    first = gather_group(own)
    for other in others:
        dist.destroy_process_group(other)
    pairs = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    second = gather_group(pairs[rank % 2])
    found = []
    for twin, expected in ((first, rank), (second, 2 * (rank % 2) + 2)):
        total = torch.tensor(float(rank))
        dist.all_reduce(total, group=twin)
        found.append(total.item() == expected)
    return found


def dropped_groups(times: int = 30) -> int:
    """Make sub-groups, and drop each of them at once; return their number."""
    world, rank = dist.group.WORLD, dist.get_rank()
    assert world is not None
    for _ in range(times):
        new_subgroup(world, [rank // 2 * 2, rank // 2 * 2 + 1])
        new_subgroup(world, ranks_of(world))
    return times


def different_counts() -> str | None:
    """Return the error of a sub-group on ranks that know different numbers of groups."""
    others = dist.new_group([0, 1])
    group = dist.new_group([1, 3])
    found = None
    if dist.get_rank() in {1, 3}:
        with mock.patch.object(groups, "_device_of_each_backend", return_value={"cpu": "another"}):
            try:
                new_subgroup(group, [dist.get_rank()])
            except RuntimeError as error:
                found = str(error)
    assert others is not None
    return found


def mesh() -> bool:
    """Use a DeviceMesh of one dimension, and each dimension of a mesh of two."""
    rank = dist.get_rank()
    whole = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    right = []
    for one in (whole, square["dp"], square["pp"]):
        transport = make_transport(one)
        members = dist.get_process_group_ranks(transport.group)
        flat = gradient(rank, 64, torch.float64)
        ranges = CUTS["even"](64, len(members))
        transport.reduce_scatter(flat, ranges).wait()
        make_transport(gather_group(one)).all_gather(flat, ranges).wait()
        right.append(same(flat, reduced([gradient(q, 64, torch.float64) for q in members])))
    try:
        make_transport(square)
    except ValueError as error:
        right.append("2" in str(error) and "mesh['dp']" in str(error))
    return all(right) and len(right) == 4


def any_order() -> bool:
    """Launch reductions and gathers of two transports in different orders on different ranks."""
    rank, size, n = dist.get_rank(), dist.get_world_size(), 400
    first, second = make_transport(), make_transport()
    ranges = CUTS["even"](n, size)
    own = slice(*ranges[rank])
    a, b, c = (gradient(rank, n, torch.float32, seed) for seed in range(3))
    launches: list[Callable[[], Any]] = [
        lambda: first.reduce_scatter(a, ranges),
        lambda: second.reduce_scatter(b, ranges),
        lambda: first.all_gather(c, ranges),
    ]
    # Tags keep the messages apart. NCCL would not allow different orders on different ranks.
    works = [launches[(at + rank) % 3]() for at in range(3)]
    for work in works:
        work.wait()
    sums = [
        reduced([gradient(q, n, torch.float32, seed) for q in range(size)]) for seed in range(2)
    ]
    gathered = torch.cat([gradient(q, n, torch.float32, 2)[slice(*ranges[q])] for q in range(size)])
    return same(a[own], sums[0][own]) and same(b[own], sums[1][own]) and same(c, gathered)
