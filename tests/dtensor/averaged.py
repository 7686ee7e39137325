"""Averagers over DTensors: a shard is averaged with the same shards on other ranks, or refused."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from functional_optim import sgd
from hooks import PeriodicModelAverager
from hooks.averaging import GossipModelAverager, OuterModelAverager
from tests.choices import case

from .jobs import plain


def replicas() -> tuple[DeviceMesh, nn.Module]:
    """Replicas with other values, each sharded over two ranks by FSDP2, whose shards are uneven."""
    mesh = init_device_mesh(
        "cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicas", "shards")
    )
    model = plain(torch.float64)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.0 + mesh.get_local_rank("replicas"))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh["shards"])
    fully_shard(model, mesh=mesh["shards"])
    return mesh, model


def wholes(model: nn.Module) -> list[Tensor]:
    return [param.full_tensor().detach() for param in model.parameters()]


def periodic() -> None:
    """Fault 39: after an averaging each replica has the mean of all, shard by shard."""
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


def refused() -> None:
    """Fault 39: shards of different elements are not averaged, and nothing is changed."""
    mesh, model = replicas()
    before = wholes(model)
    for group in (None, mesh.get_group("shards")):
        averager = PeriodicModelAverager(2, process_group=group)
        with pytest.raises(ValueError, match=r"of DTensors the same shards"):
            averager.average_parameters(model.parameters())
        assert averager.step == 0
    group = mesh.get_group("replicas")
    with pytest.raises(ValueError, match=r"'params\[0\]' is a DTensor .*OuterModelAverager"):
        OuterModelAverager(model.parameters(), sgd(lr=0.7), 2, process_group=group)
    with pytest.raises(ValueError, match=r"'params\[0\]' is a DTensor .*GossipModelAverager"):
        GossipModelAverager(model.parameters(), 2, process_group=group)
    assert all(torch.equal(one, other) for one, other in zip(before, wholes(model), strict=True))
