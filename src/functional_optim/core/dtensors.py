"""DTensors: detection, and the part on this rank, without importing torch's package."""

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_MODULE = "torch.distributed.tensor"


def is_sharded(tensor: Any) -> "TypeGuard[DTensor]":
    """Return True if it is a DTensor; there is none before somebody has imported that class."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(tensor, module.DTensor)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on each rank that has a part of it; TorchScript has none that is cut."""
    if torch.jit.is_scripting():  # what is not to be compiled stands in the other branch
        found = tensor
    else:
        found = tensor.full_tensor() if is_sharded(tensor) else tensor
    return found


def placed_as(value: Tensor, like: Tensor) -> Tensor:
    """A result as the tensor lies whose place it takes: products of DTensors may lie otherwise."""
    if is_sharded(like) and is_sharded(value) and value.placements != like.placements:
        return value.redistribute(like.device_mesh, like.placements)
    return value


def sum_over_ranks(part: Tensor, like: "DTensor") -> Tensor:
    """Return the sum of what all ranks hold, by one collective for each dimension of the mesh.

    Args:
        part: what the shards of this rank add: of the same shape on all ranks.
        like: a DTensor that is cut as theirs are. Over a dimension of the mesh on which it is
            replicated, ranks hold the same part, which counts once.

    Returns:
        A plain tensor, with the same bits on all ranks.
    """
    module: Any = sys.modules[_MODULE]
    kinds = [
        module.Replicate() if one.is_replicate() else module.Partial() for one in like.placements
    ]
    made: Tensor = module.DTensor.from_local(part, like.device_mesh, kinds, run_check=False)
    return whole(made)


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor on this rank: a DTensor's shard, or any other tensor itself."""
    return tensor.to_local() if is_sharded(tensor) else tensor
