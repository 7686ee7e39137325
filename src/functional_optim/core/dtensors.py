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


def reduced(value: Tensor) -> Tensor:
    """Return a tensor without partial results: of a DTensor, ranks add up what each has of it.

    A state holds no partial results, since nothing can be written into them in place.
    """
    if is_sharded(value) and any(one.is_partial() for one in value.placements):
        module: Any = sys.modules[_MODULE]
        kinds = [module.Replicate() if one.is_partial() else one for one in value.placements]
        return value.redistribute(value.device_mesh, kinds)
    return value


def local_part(value: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of a tensor that each rank holds as a whole.

    Args:
        value: a plain tensor, the same on all ranks.
        like: a tensor of its shape. If it is a DTensor, the part is cut as its shard.
    """
    if torch.jit.is_scripting():
        found = value
    elif is_sharded(like):
        module: Any = sys.modules[_MODULE]
        # Without a source rank, each rank takes its shard from its own copy: no communication.
        cut = module.distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
        found = local(cut)
    else:
        found = value
    return found


def from_local_part(part: Tensor, like: Tensor) -> Tensor:
    """Return the tensor whose part this rank holds: the inverse of :func:`local_part`."""
    if torch.jit.is_scripting():
        found = part
    elif is_sharded(like):
        module: Any = sys.modules[_MODULE]
        found = module.DTensor.from_local(
            part,
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )
    else:
        found = part
    return found
