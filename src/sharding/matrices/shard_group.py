"""The ranks over which FSDP2 shards the parameters of a module, and the rows that each has."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import torch.distributed as dist
from torch import Tensor

from functional_optim.core.dtensors import is_sharded, local
from functional_optim.core.local_shards import placed
from sharding.transport.peers import GroupRank

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Rows = tuple[int, int]
"""The rows [start, stop) of a tensor: indices of dimension 0."""


class ShardGroup(NamedTuple):
    """The ranks that together hold one copy of all parameters."""

    group: dist.ProcessGroup
    rank: GroupRank
    """This process's number in the group."""
    size: int
    example: "DTensor"
    """A parameter that is sharded over it."""

    def rows(self, size: int) -> list[Rows]:
        """Return the rows of each rank, of a tensor with so many: as torch.chunk cuts it.

        Example::

            >>> ShardGroup(None, 0, 4, None).rows(5)
            [(0, 2), (2, 4), (4, 5), (5, 5)]
        """
        each = -(-size // self.size)
        return [(min(size, k * each), min(size, (k + 1) * each)) for k in range(self.size)]


def is_cut(param: Tensor) -> "TypeGuard[DTensor]":
    """Return True for a DTensor of which a rank holds a part only, by its placements."""
    return is_sharded(param) and not all(one.is_replicate() for one in param.placements)


def find_shard_group(params: Mapping[str, Tensor], known: ShardGroup | None = None) -> ShardGroup:
    """Find the ranks over which parameters are sharded.

    Args:
        params: by name. Plain tensors and replicated DTensors are taken as they are.
        known: the group that others are sharded over already.

    Raises:
        ValueError: a DTensor that is sharded otherwise than on dimension 0 along one dimension of
            its mesh, as tensor parallelism does it; two that are sharded over other meshes; none
            that is sharded.
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
                f"the parameter at {name!r} is sharded over {placed(param)}, and {first} over "
                f"{placed(like)}; all sharded parameters of a MatrixOwnerOptimizer have one mesh "
                "and one placement: make an optimizer for each mesh"
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
            f"the parameter at {name!r} is sharded over {placed(param)}, and a "
            "MatrixOwnerOptimizer takes Shard(0) along one dimension of a mesh, the others "
            "replicated, as fully_shard makes it; tensor parallelism, a second sharded dimension "
            "and shard_placement_fn are not supported: step such parameters by another optimizer"
        )


def check_rows(shards: ShardGroup, params: Mapping[str, Tensor]) -> None:
    """Make sure that this rank holds the rows of sharded parameters that are expected of it.

    Raises:
        ValueError: names the first parameter of which it holds others.
    """
    for name, param in params.items():
        if not is_cut(param):
            continue
        start, stop = shards.rows(param.shape[0])[shards.rank]
        found = tuple(local(param.detach()).shape)
        if found != (stop - start, *param.shape[1:]):
            raise ValueError(
                f"this rank holds a part of shape {found} of the parameter at {name!r}, whose "
                f"shape is {tuple(param.shape)}, and rows {start} to {stop} are expected of group "
                f"rank {shards.rank}; shard it by fully_shard or distribute_tensor"
            )
