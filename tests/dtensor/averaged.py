"""Tests of averagers over DTensors, which average equal shards and refuse other shards."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from functional_optim import chain, clip_by_global_norm, muon, sgd
from hooks import ModelAverager, PeriodicModelAverager
from hooks.averaging import OuterModelAverager
from hooks.averaging.compression import BFloat16
from hooks.averaging.contrib import GossipModelAverager
from tests.choices import case
from tests.tensors import normal

from .jobs import plain

DILOCO = sgd(lr=0.7, momentum=0.9, nesterov=True)


def replicas(
    dtype: torch.dtype = torch.float64, *, apart: bool = True
) -> tuple[DeviceMesh, nn.Module]:
    """Return replicas that FSDP2 shards unevenly over two ranks each.

    Args:
        dtype: the dtype of the parameters.
        apart: True if replicas have different values.
    """
    mesh = init_device_mesh(
        "cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicas", "shards")
    )
    model = plain(dtype)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.0 + apart * mesh.get_local_rank("replicas"))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh["shards"])
    fully_shard(model, mesh=mesh["shards"])
    return mesh, model


def wholes(model: nn.Module) -> list[Tensor]:
    return [param.full_tensor().detach() for param in model.parameters()]


def periodic() -> None:
    """Fault 39: after averaging, each replica has the mean of all replicas, shard by shard."""
    for delay in (0, 1):
        with case(delay=delay):
            mesh, model = replicas()
            averager = PeriodicModelAverager(
                2, process_group=mesh.get_group("replicas"), delay=delay
            )
            count = mesh.size(0)
            before = [one / (1.0 + mesh.get_local_rank("replicas")) for one in wholes(model)]
            versions = [param._version for param in model.parameters()]
            for _ in range(1 + delay):
                averager.average_parameters(model.parameters())
            for one, after in zip(before, wholes(model), strict=True):
                assert torch.allclose(after, one * (1 + count) / 2, rtol=1e-12, atol=0.0)
            for version, param in zip(versions, model.parameters(), strict=True):
                assert param._version > version


def steps_of_its_own(params: list[Tensor], replica: int, step: int) -> None:
    """Make a step that depends on the replica, and acts equally on a shard and on its whole."""
    with torch.no_grad():
        for param in params:
            param.mul_(1.0 - 0.01 * (1 + replica) * (1 + step % 3)).add_(0.125 * (replica - 1))


AVERAGERS: dict[str, Callable[[list[Tensor], dist.ProcessGroup], ModelAverager]] = {
    "periodic": lambda params, group: PeriodicModelAverager(2, process_group=group),
    "periodic, delayed": lambda params, group: PeriodicModelAverager(
        3, process_group=group, delay=2, bucket_bytes=40
    ),
    "DiLoCo": lambda params, group: OuterModelAverager(params, DILOCO, 3, process_group=group),
    "DiLoCo, streaming": lambda params, group: OuterModelAverager(
        params, DILOCO, 3, process_group=group, fragments=2, delay=1, mixing=0.5
    ),
    "DiLoCo, bfloat16": lambda params, group: OuterModelAverager(
        params, DILOCO, 3, process_group=group, compression=BFloat16()
    ),
    "gossip": lambda params, group: GossipModelAverager(params, 3, process_group=group, seed=5),
}


def same_as_plain() -> None:
    """Averaging uneven float32 shards gives the bits of averaging whole tensors."""
    for name, make in AVERAGERS.items():
        mesh, model = replicas(torch.float32, apart=False)
        group, replica = mesh.get_group("replicas"), mesh.get_local_rank("replicas")
        sharded = list(model.parameters())
        whole: list[Tensor] = [nn.Parameter(one) for one in wholes(model)]
        averagers = [make(params, group) for params in (sharded, whole)]
        versions = [one._version for one in sharded]
        for step in range(7):
            for params, averager in zip((sharded, whole), averagers, strict=True):
                steps_of_its_own(params, replica, step)
                averager.average_parameters(params)
            with case(name=name, step=step):
                for one, other in zip(wholes(model), whole, strict=True):
                    assert torch.equal(one, other)
        assert all(one._version > v for one, v in zip(sharded, versions, strict=True))
        saved = averagers[0].state_dict()
        again = make(sharded, group)
        again.load_state_dict(saved)
        assert again.step == 7


def refused() -> None:
    """Fault 39: shards of different elements are not averaged, and nothing changes.

    Even shards have equal shapes on all ranks, so only their coordinates differ.
    """
    mesh, model = replicas()
    uneven: list[Tensor] = list(model.parameters())
    even: list[Tensor] = [nn.Parameter(distribute_tensor(normal(4, 2), mesh["shards"], [Shard(0)]))]
    for name, params in {"uneven": uneven, "even": even}.items():
        before = [param.full_tensor().detach() for param in params]
        for over, group in {"world": None, "shards": mesh.get_group("shards")}.items():
            with case(shards=name, group=over):
                _refused(params, group)
        after = [param.full_tensor() for param in params]
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    group = mesh.get_group("replicas")
    for rule in (muon(lr=0.1), chain(clip_by_global_norm(1.0), sgd(lr=0.7))):
        with pytest.raises(ValueError, match=r"params\[0\] is a DTensor .*, of the outer rule"):
            OuterModelAverager(uneven, rule, 2, process_group=group)


def _refused(params: list[Tensor], group: dist.ProcessGroup | None) -> None:
    """Check that no averager over a group takes these shards."""
    averager = PeriodicModelAverager(2, process_group=group)
    with pytest.raises(ValueError, match=r"of DTensors the same shards"):
        averager.average_parameters(params)
    assert averager.step == 0
    outer = OuterModelAverager(params, sgd(lr=0.7), 2, process_group=group)
    outer.average_parameters()
    with pytest.raises(ValueError, match=r"of DTensors the same shards"):
        outer.average_parameters()
    if group is not None:  # in the world, two ranks with equal shards may be partners
        gossip = GossipModelAverager(params, 1, process_group=group)
        with pytest.raises(ValueError, match=r"of DTensors the same shards"):
            gossip.average_parameters()
