"""What ranks do in the tests of averaging."""

import hashlib
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from functional_optim import TorchOptimizer, adamw, sgd
from hooks import (
    AveragingSchedule,
    OptimizerState,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    PostLocalSGDState,
    ScheduledModelAverager,
    post_localSGD_hook,
    step_hook,
)
from hooks.averaging import GossipModelAverager, OuterModelAverager
from sharding import ZeroRedundancyOptimizer
from tests.averaging_alone.training import backward, model, train, values, wrapped

SCHEDULE = AveragingSchedule((2, 4), (2, None), warmup=1)


def digest(tensors: Sequence[Tensor]) -> str:
    return hashlib.sha256(b"".join(one.numpy().tobytes() for one in tensors)).hexdigest()


def alone_and_averaged(group: Any, delay: int = 0, steps: int = 8) -> str:
    """Each rank on its own gradients, with means of parameters and state now and then."""
    module = model()
    optimizer = PostLocalSGDOptimizer(
        TorchOptimizer(module.parameters(), adamw(lr=0.05)),
        ScheduledModelAverager(SCHEDULE, group, delay=delay, bucket_bytes=64),
        average_state=True,
    )
    train(module, optimizer, group.rank(), range(steps))
    return digest(values(module))


def in_the_world(delay: int) -> str:
    return alone_and_averaged(dist.group.WORLD, delay)


def in_parts() -> str:
    """The same in two halves of the world, whose ranks have other numbers than in the world."""
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return alone_and_averaged(halves[dist.get_rank() % 2], steps=7)


def in_a_mesh() -> list[list[int]]:
    """Over each dimension of a mesh: which ranks average together."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "rank"))
    found = []
    for name in ("node", "rank"):
        param = nn.Parameter(torch.tensor([2.0 ** dist.get_rank()]))
        PeriodicModelAverager(2, 0, mesh[name]).average_parameters([param])
        together = round(2 * param.item())
        found.append([rank for rank in range(4) if together & 2**rank])
    return found


def bytes_sent(steps: int) -> tuple[int, int]:
    """Of this rank, and the parameters' bytes."""
    module = nn.Linear(50, 40)
    averager = ScheduledModelAverager(SCHEDULE)
    for _ in range(steps):
        averager.average_parameters(module.parameters())
    return averager.bytes_sent, sum(param.nbytes for param in module.parameters())


def sharded_inside(steps: int) -> str:
    """Two nodes of two ranks: ZeRO inside a node, an outer optimizer across nodes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "rank"))
    module = model()
    zero = ZeroRedundancyOptimizer(
        module.parameters(), torch.optim.AdamW, mesh["rank"].get_group(), lr=0.05
    )
    return outer(module, zero, mesh["node"], dist.get_rank() // 2, steps)


def outer(module: nn.Module, inner: Any, group: Any, node: int, steps: int) -> str:
    """DiLoCo over a group; ranks of a node have the same data."""
    nesterov = sgd(lr=0.7, momentum=0.9, nesterov=True)
    averager = OuterModelAverager(module.parameters(), nesterov, 3, process_group=group)
    train(module, PostLocalSGDOptimizer(inner, averager), node, range(steps))
    return digest(values(module))


def unsharded(group: Any, steps: int) -> str:
    """The same by two ranks, each a node of its own."""
    module = model()
    adamw_ = torch.optim.AdamW(module.parameters(), lr=0.05, foreach=False)
    return outer(module, adamw_, group, group.rank(), steps)


def gossiped(group: Any = None) -> tuple[str, int]:
    """Pairs that meet every other step; the parameters, and the bytes sent."""
    module = model()
    averager = GossipModelAverager(module.parameters(), 2, process_group=group, seed=1)
    inner = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer = PostLocalSGDOptimizer(inner, averager)
    train(module, optimizer, dist.get_rank() if group is None else group.rank(), range(9))
    return digest(values(module)), averager.bytes_sent


def one_dies(at: int) -> str:
    """Rank 1 is gone after some steps; what the others are told."""
    module = model()
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer = PostLocalSGDOptimizer(sgd, PeriodicModelAverager(2))
    for step in range(6):
        if dist.get_rank() == 1 and step == at:
            os._exit(3)
        backward(module, dist.get_rank(), step)
        try:
            optimizer.step()
        except RuntimeError as error:
            return f"step {step}: {type(error).__name__}: {error}"
    return "no error"


def front_ends(under_ddp: bool) -> dict[str, str]:
    """Every front-end that trains over ranks, a few steps each; digests of the parameters."""
    group, rank = dist.group.WORLD, dist.get_rank()
    found = {}
    module = model()
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    train(module, PostLocalSGDOptimizer(sgd, PeriodicModelAverager(3)), rank, range(4))
    found["local SGD"] = digest(values(module))

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
    ddp = nn.parallel.DistributedDataParallel(module)
    ddp.register_comm_hook(None, step_hook(OptimizerState(adamw(lr=0.1), ddp)))
    for step in range(3):
        backward(ddp, rank, step)
    found["step hook"] = digest(values(module))
    return found


def begun_by(ways: Sequence[str], folder: str, ports: Sequence[int]) -> dict[str, dict[str, str]]:
    """The front-ends in a world that is begun anew, in each of some ways."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found = {}
    for way, port in zip(ways, ports, strict=True):
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
