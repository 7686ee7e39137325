"""The ranks over which FSDP2 shards the parameters of a module, and the rows of each rank."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import torch.distributed as dist
from torch import Tensor

from functional_optim.engine.tensors import format_placements, is_dtensor, to_local
from sharding.transport.groups import GroupRank
from sharding.transport.protocol import Range

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class ShardGroup(NamedTuple):
    """The ranks that together hold one copy of all parameters."""

    group: dist.ProcessGroup
    rank: GroupRank
    """The rank of this process in the group."""
    size: int
    example: "DTensor"
    """A parameter that is sharded over the group."""

    def rows(self, size: int) -> list[Range]:
        """Return the rows [start, stop) of each rank, of ``size`` rows: as torch.chunk cuts them.

        Example::

            >>> ShardGroup(None, 0, 4, None).rows(5)
            [(0, 2), (2, 4), (4, 5), (5, 5)]
        """
        each = -(-size // self.size)
        return [(min(size, k * each), min(size, (k + 1) * each)) for k in range(self.size)]


def is_cut(param: Tensor) -> "TypeGuard[DTensor]":
    """Return True if a rank holds only a part of a tensor, by the placements of a DTensor."""
    return is_dtensor(param) and not all(one.is_replicate() for one in param.placements)


def find_shard_group(params: Mapping[str, Tensor], known: ShardGroup | None = None) -> ShardGroup:
    """Find the ranks over which parameters are sharded.

    Args:
        params: by name. Plain tensors and replicated DTensors are ignored.
        known: the group over which other parameters are sharded already.

    Raises:
        ValueError: a DTensor that is not sharded on dimension 0 along one dimension of its mesh, as
            with tensor parallelism; two that are sharded over different meshes; no sharded DTensor.
    """
    like = None if known is None else known.example
    first = "the parameters before"
    for name, param in params.items():
        if not is_cut(param):
            continue
        _check_placements(param, name)
        if like is None:
            like, first = param, repr(name)
        elif (param.device_mesh, param.placements) != (like.device_mesh, like.placements):
            raise ValueError(
                f"the parameter at {name!r} is sharded over {format_placements(param)}, and "
                f"{first} over {format_placements(like)}; all sharded parameters of a "
                "MatrixOwnerOptimizer have one mesh and one placement: make an "
                "optimizer for each mesh"
            )
    if known is not None:
        return known
    if like is None:
        raise ValueError(
            f"none of {len(params)} parameters is a sharded DTensor, so none has to be gathered; "
            "call fully_shard on the module first, or use TorchOptimizer"
        )
    place = next(k for k, one in enumerate(like.placements) if one.is_shard())
    group = like.device_mesh.get_group(place)
    return ShardGroup(group, GroupRank(group.rank()), group.size(), like)


def _check_placements(param: "DTensor", name: str) -> None:
    cut = [one for one in param.placements if not one.is_replicate()]
    if len(cut) != 1 or not cut[0].is_shard(0):
        raise ValueError(
            f"the parameter at {name!r} is sharded over {format_placements(param)}, and a "
            "MatrixOwnerOptimizer takes Shard(0) along one dimension of a mesh, the others "
            "replicated, as fully_shard makes it; tensor parallelism, a second sharded dimension "
            "and shard_placement_fn are not supported: step such parameters by another optimizer"
        )


def check_rows(shards: ShardGroup, params: Mapping[str, Tensor]) -> None:
    """Raise ValueError if this rank does not hold the expected rows of a sharded parameter."""
    for name, param in params.items():
        if not is_cut(param):
            continue
        start, stop = shards.rows(param.shape[0])[shards.rank]
        found = tuple(to_local(param.detach()).shape)
        if found != (stop - start, *param.shape[1:]):
            raise ValueError(
                f"this rank holds a part of shape {found} of the parameter at {name!r}, whose "
                f"shape is {tuple(param.shape)}, and rows {start} to {stop} are expected of group "
                f"rank {shards.rank}; shard it by fully_shard or distribute_tensor"
            )
