"""DTensors cut from whole tensors without a collective, and gathered by one collective for all."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Placement


def cut(tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Return a DTensor of a tensor that all ranks have."""
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def cut_like(tensor: Tensor, other: Tensor) -> Tensor:
    """Shard a tensor like another tensor, if the other one is a DTensor."""
    if isinstance(other, DTensor):
        return cut(tensor, other.device_mesh, other.placements)
    return tensor


def gather(tensors: Iterable[Tensor | None]) -> list[Any]:
    """Return whole tensors in new memory, and None for None, by one collective for all.

    All sharded DTensors are sharded over the same dimension of one mesh. A replicated DTensor is
    returned as this rank has it.
    """
    given: list[Any] = [*tensors]
    shards = [None if one is None else _local(one) for one in given]
    sharded = [_sharding(one) for one in given]
    groups = [
        one.device_mesh.get_group(found[0])
        for one, found in zip(given, sharded, strict=True)
        if found
    ]
    if not groups:
        return shards
    parts: list[Any] = [None] * dist.get_world_size(groups[0])
    dist.all_gather_object(parts, shards, groups[0])
    return [
        torch.cat([part[place] for part in parts], found[1]) if found else shards[place]
        for place, found in enumerate(sharded)
    ]


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone()


def _sharding(tensor: Tensor | None) -> tuple[int, int] | None:
    """Return the dimension of the mesh and of the tensor in which a tensor is sharded."""
    if not isinstance(tensor, DTensor):
        return None
    found = [(k, one.dim) for k, one in enumerate(tensor.placements) if one.is_shard()]
    assert len(found) < 2
    return found[0] if found else None
