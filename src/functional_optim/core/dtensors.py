"""Conversions between DTensors and their local shards, without importing torch's package."""

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_MODULE = "torch.distributed.tensor"


def is_dtensor(tensor: Any) -> "TypeGuard[DTensor]":
    """Return True for a DTensor. Before the package is imported, there are no DTensors."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(tensor, module.DTensor)


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole tensor of a DTensor, or any other tensor. TorchScript has no DTensors."""
    if not torch.jit.is_scripting():  # noqa: SIM102  TorchScript skips this condition alone
        if is_dtensor(tensor):
            return tensor.full_tensor()
    return tensor


def redistribute_like(value: Tensor, like: Tensor) -> Tensor:
    """Return a DTensor with the placements of ``like``: products may have other placements."""
    if is_dtensor(like) and is_dtensor(value) and value.placements != like.placements:
        return value.redistribute(like.device_mesh, like.placements)
    return value


def sum_over_ranks(part: Tensor, like: "DTensor") -> Tensor:
    """Sum a tensor over ranks, by one collective for each dimension of the mesh of ``like``.

    If ``like`` is replicated over a mesh dimension, its ranks have equal addends, and one of them
    counts. The result is a plain tensor, with the same bits on all ranks.
    """
    module: Any = sys.modules[_MODULE]
    kinds = [
        module.Replicate() if one.is_replicate() else module.Partial() for one in like.placements
    ]
    made: Tensor = module.DTensor.from_local(part, like.device_mesh, kinds, run_check=False)
    return full_tensor(made)


def to_local(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor, or any other tensor."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def reduce_partial(value: Tensor) -> Tensor:
    """Replicate the ``Partial`` placements of a DTensor, which sums over ranks.

    A state must have no partial placements, since they cannot be written in place.
    """
    if is_dtensor(value) and any(one.is_partial() for one in value.placements):
        module: Any = sys.modules[_MODULE]
        kinds = [module.Replicate() if one.is_partial() else one for one in value.placements]
        return value.redistribute(value.device_mesh, kinds)
    return value


def shard_like(value: Tensor, like: Tensor) -> Tensor:
    """Return this rank's shard, as of ``like``, of a plain tensor that is equal on all ranks."""
    if not torch.jit.is_scripting():  # noqa: SIM102  TorchScript skips this condition alone
        if is_dtensor(like):
            module: Any = sys.modules[_MODULE]
            # Without a source rank, each rank takes its shard from its own copy: no communication.
            return to_local(
                module.distribute_tensor(
                    value, like.device_mesh, like.placements, src_data_rank=None
                )
            )
    return value


def unshard_like(part: Tensor, like: Tensor) -> Tensor:
    """Return the DTensor of a local shard: the inverse of :func:`shard_like`."""
    if not torch.jit.is_scripting():  # noqa: SIM102  TorchScript skips this condition alone
        if is_dtensor(like):
            return type(like).from_local(
                part,
                like.device_mesh,
                like.placements,
                run_check=False,
                shape=like.shape,
                stride=like.stride(),
            )
    return part
