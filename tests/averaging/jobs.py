"""Jobs of the ranks in the tests of averaging."""

import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.distributed.device_mesh import init_device_mesh

from functional_optim import TorchOptimizer, adamw, sgd
from hooks import (
    AveragingSchedule,
    HierarchicalModelAverager,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    PostLocalSGDState,
    ScheduledModelAverager,
    post_localSGD_hook,
    step_hook,
)
from hooks.averaging import OuterModelAverager
from hooks.averaging.contrib import GossipModelAverager, PowerSGDMemory, Statistical, power_sgd_hook
from sharding import ZeroRedundancyOptimizer
from tests.averaging_alone.training import backward, model, train, values, wrapped
from tests.zero_local.compare import digest

SCHEDULE = AveragingSchedule((2, 4), (2, None), warmup=1)


AVERAGERS: dict[str, Callable[[Any], Any]] = {
    "hierarchical": lambda params: HierarchicalModelAverager({1: 1, 3: 2}),
    "delayed": lambda params: ScheduledModelAverager(AveragingSchedule(2, warmup=2), delay=1),
    "DiLoCo": lambda params: OuterModelAverager(params, sgd(lr=0.7, momentum=0.9), 2),
    "2 bits": lambda params: OuterModelAverager(params, sgd(lr=0.7), 2, compression=Statistical(2)),
    "gossip": lambda params: GossipModelAverager(params, 2),
}
"""Averagers for two ranks and four steps; all but the delayed one end with equal ranks."""


def alone_and_averaged(group: Any, delay: int = 0, steps: int = 8) -> str:
    """Train each rank on its own data, with some means of parameters and state.

    Return all numbers, so that a failing test shows by how much they differ.
    """
    module = model()
    optimizer = PostLocalSGDOptimizer(
        TorchOptimizer(module.parameters(), adamw(lr=0.05)),
        ScheduledModelAverager(SCHEDULE, group, delay=delay, bucket_bytes=64),
        average_state=True,
    )
    train(module, optimizer, group.rank(), range(steps))
    return str([one.tolist() for one in values(module)])


def in_the_world(delay: int) -> str:
    return alone_and_averaged(dist.group.WORLD, delay)


def in_parts() -> list[str]:
    """Train in two halves of the world, where ranks have other numbers than in the world."""
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return in_a_half(halves[dist.get_rank() % 2])


def in_a_half(group: Any) -> list[str]:
    """Train in a half of the world: by means, by an outer rule, and in pairs."""
    pairs, _ = gossiped(group)
    return [alone_and_averaged(group, steps=7), unsharded(group, steps=7), pairs]


def joins_late() -> tuple[str, str, int]:
    """Let rank 2 join in mid-period; return digests of its start and end, and the steps."""
    rank, two = dist.get_rank(), dist.new_group([0, 1])

    def made(group: Any) -> tuple[nn.Module, PostLocalSGDOptimizer]:
        module, nesterov = model(), sgd(lr=0.7, momentum=0.9, nesterov=True)
        averager = OuterModelAverager(module.parameters(), nesterov, 4, process_group=group)
        inner = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5)
        return module, PostLocalSGDOptimizer(inner, averager)

    saved: list[Any] = [None]
    if rank < 2:
        module, optimizer = made(two)
        train(module, optimizer, rank, range(6))
        saved = [(module.state_dict(), optimizer.state_dict())]
    from_0 = list(saved)
    dist.broadcast_object_list(from_0, 0)
    module, optimizer = made(None)
    of_module, of_optimizer = (saved if rank < 2 else from_0)[0]
    module.load_state_dict(of_module)
    optimizer.load_state_dict(of_optimizer)
    begun = digest(values(module))
    train(module, optimizer, rank, range(6, 8))
    return begun, digest(values(module)), optimizer.averager.step


def in_a_mesh() -> list[list[int]]:
    """Return the ranks that average together, over each dimension of a mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "rank"))
    found = []
    for name in ("node", "rank"):
        for make in (
            lambda params, group: PeriodicModelAverager(2, 0, group),
            lambda params, group: OuterModelAverager(params, sgd(lr=1.0), 1, process_group=group),
            lambda params, group: GossipModelAverager(
                params, 1, lr=1.0, momentum=0.0, process_group=group
            ),
        ):
            param = nn.Parameter(torch.zeros(1))
            averager = make([param], mesh[name])
            param.data += 2.0 ** dist.get_rank()
            averager.average_parameters([param])
            together = round(2 * param.item())
            found.append([rank for rank in range(4) if together & 2**rank])
    return found


def bytes_sent(steps: int) -> tuple[int, int]:
    """Return the bytes that this rank sent, and the bytes of the parameters."""
    module = nn.Linear(50, 40)
    averager = ScheduledModelAverager(SCHEDULE)
    for _ in range(steps):
        averager.average_parameters(module.parameters())
    return averager.bytes_sent, sum(param.nbytes for param in module.parameters())


def sharded_inside(steps: int) -> str:
    """Train two nodes of two ranks: ZeRO inside a node, an outer optimizer across nodes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "rank"))
    module = model()
    zero = ZeroRedundancyOptimizer(
        module.parameters(), torch.optim.AdamW, mesh["rank"].get_group(), lr=0.05
    )
    return outer(module, zero, mesh["node"], dist.get_rank() // 2, steps)


def outer(module: nn.Module, inner: Any, group: Any, node: int, steps: int) -> str:
    """Train by DiLoCo over a group; the ranks of a node have the same data."""
    nesterov = sgd(lr=0.7, momentum=0.9, nesterov=True)
    averager = OuterModelAverager(module.parameters(), nesterov, 3, process_group=group)
    train(module, PostLocalSGDOptimizer(inner, averager), node, range(steps))
    return digest(values(module))


def unsharded(group: Any, steps: int) -> str:
    """Train as ``sharded_inside`` does, with one rank in each node."""
    module = model()
    adamw_ = torch.optim.AdamW(module.parameters(), lr=0.05, foreach=False)
    return outer(module, adamw_, group, group.rank(), steps)


def gossiped(group: Any = None) -> tuple[str, int]:
    """Train with gossip at every other step; return a digest and the bytes sent."""
    module = model()
    averager = GossipModelAverager(module.parameters(), 2, process_group=group, seed=1)
    inner = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer = PostLocalSGDOptimizer(inner, averager)
    train(module, optimizer, dist.get_rank() if group is None else group.rank(), range(9))
    return digest(values(module)), averager.bytes_sent


def front_ends(under_ddp: bool) -> dict[str, str]:
    """Train a few steps with each front-end; return digests of the parameters."""
    group, rank = dist.group.WORLD, dist.get_rank()
    found = {}
    module = model()
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    train(module, PostLocalSGDOptimizer(sgd, PeriodicModelAverager(3)), rank, range(4))
    found["local SGD"] = digest(values(module))

    for name, make in AVERAGERS.items():
        module = model()
        sgd_ = torch.optim.SGD(module.parameters(), lr=0.1)
        optimizer = PostLocalSGDOptimizer(sgd_, make(module.parameters()))
        train(module, optimizer, rank, range(4))
        found[name] = digest(values(module))

    module = model()
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=0.1)
    for step in range(3):
        backward(module, 0, step)
        optimizer.step()
    found["ZeRO"] = digest(values(module))
    if not under_ddp:
        return found

    module = model()
    ddp = wrapped(module, group, post_localSGD_hook, PostLocalSGDState(None, group, 1))
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    train(ddp, PostLocalSGDOptimizer(sgd, PeriodicModelAverager(2, 1)), rank, range(4))
    found["local SGD, hook"] = digest(values(module))

    module = model()
    memory = PowerSGDMemory(PowerSGDState(group, 1, 2, min_compression_rate=1), module)
    ddp = wrapped(module, group, power_sgd_hook, memory)
    train(ddp, torch.optim.SGD(module.parameters(), lr=0.1), rank, range(4))
    found["PowerSGD"] = digest(values(module))

    module = model()
    ddp = nn.parallel.DistributedDataParallel(module)
    step_hook(ddp, adamw(lr=0.1))
    for step in range(3):
        backward(ddp, rank, step)
    found["step hook"] = digest(values(module))
    return found


def free_port() -> int:
    """Return a free port, the same on all ranks; all ranks must call this, and use it at once."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = [server.getsockname()[1]]
    dist.broadcast_object_list(found)
    return int(found[0])


def begun_by(ways: Sequence[str], folder: str) -> dict[str, dict[str, str]]:
    """Start the world again in each of these ways, and train all front-ends in it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found = {}
    for way in ways:
        port = free_port()
        dist.barrier()
        dist.destroy_process_group()
        method, _, level = way.partition(", ")
        dist.set_debug_level(getattr(dist.DebugLevel, level or "OFF"))
        if method == "env://":
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
        place = {
            "env://": "env://",
            "tcp://": f"tcp://127.0.0.1:{port}",
            "file://": f"file://{folder}/{level or 'plain'}",
        }[method]
        dist.init_process_group("gloo", init_method=place, rank=rank, world_size=size)
        # torch 2.13's DistributedDataParallel ends with a segmentation fault under DETAIL.
        found[way] = front_ends(under_ddp=level != "DETAIL")
    dist.set_debug_level(dist.DebugLevel.OFF)
    return found
