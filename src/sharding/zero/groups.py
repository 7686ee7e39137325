"""Process groups, transports, and sums over ranks of a ZeroRedundancyOptimizer."""

import math
from collections.abc import Mapping
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from functional_optim.kernels.totals import sum_in_order
from sharding.shard_plan import ShardPlan
from sharding.transport import Transport, make_transport
from sharding.transport.groups import new_subgroup, ranks_of


def shard_group(group: dist.ProcessGroup, plan: ShardPlan) -> dist.ProcessGroup:
    """Return the group of the ranks that share one replica with this rank. Collective."""
    if plan.replicas == 1:
        return group
    members = ranks_of(group)
    first = group.rank() // plan.shard_ranks * plan.shard_ranks
    return new_subgroup(group, members[first : first + plan.shard_ranks])


class Transports(dict[torch.device, Transport]):
    """A transport for each device, over one group, created when a device is first used."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def __missing__(self, device: torch.device) -> Transport:
        self[device] = make_transport(self.group, device)
        return self[device]


def vector_of(addends: Mapping[str, Tensor], plan: ShardPlan) -> Tensor:
    """Return a float64 vector with an entry for each parameter of a plan; see :func:`vector_at`."""
    return vector_at(addends, {path: plan.index_of(path) for path in addends}, len(plan.specs))


def vectors_of(addends: Mapping[str, Tensor], plan: ShardPlan, numbers: int) -> Tensor:
    """Return a vector for each element of an addend; one vector if addends are scalars."""
    if not numbers:
        return vector_of(addends, plan)
    columns = [{path: row[k] for path, row in addends.items()} for k in range(numbers)]
    return torch.stack([vector_of(one, plan) for one in columns])


def vector_at(addends: Mapping[str, Tensor], places: Mapping[str, int], count: int) -> Tensor:
    """Return a float64 vector of ``count`` entries, with addends at their indices, else zeros.

    If all addends are on one device, so is the vector, and the host need not wait. Otherwise it is
    on the CPU.
    """
    by_device: dict[torch.device, list[str]] = {}
    for path, addend in addends.items():
        by_device.setdefault(addend.device, []).append(path)
    device = next(iter(by_device)) if len(by_device) == 1 else torch.device("cpu")
    vector = torch.zeros(count, dtype=torch.float64, device=device)
    for paths in by_device.values():  # one copy for each device, not for each addend
        values = torch.stack([addends[path].to(torch.float64) for path in paths])
        vector[_indices(tuple(places[path] for path in paths), device)] = values.to(device)
    return vector


@lru_cache(maxsize=512)
def _indices(places: tuple[int, ...], device: torch.device) -> Tensor:
    """Return indices as a tensor, cached, since the host waits for a copy to a device."""
    return torch.tensor(places, device=device)


def all_reduce_vector(
    vector: Tensor, plan: ShardPlan, group: dist.ProcessGroup, device: torch.device
) -> Tensor:
    """Return the sum of all ranks' vectors, on the CPU; only the first replica counts."""
    counts = group.rank() < plan.shard_ranks
    moved = (vector if counts else torch.zeros_like(vector)).to(device, copy=True)
    dist.all_reduce(moved, group=group)
    return moved.cpu()


def all_reduce_max(vector: Tensor, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """Return the elementwise maximum of all ranks' vectors; NaN if an element is NaN on a rank."""
    # A maximum over ranks may ignore NaN, so NaN is reduced as a second row.
    both = torch.stack([vector.nan_to_num(0.0, math.inf), vector.isnan().double()]).to(device)
    dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    numbers, is_nan = both.cpu()
    found: Tensor = numbers.masked_fill(is_nan != 0.0, math.nan)
    return found


def sum_vector(vector: Tensor) -> Tensor:
    """Return the sum of a vector, bit for bit as one process sums its elements."""
    return sum_in_order(vector.tolist())
