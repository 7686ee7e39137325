"""The process group of a ZeroRedundancyOptimizer, and small things that its ranks do together."""

import math
from collections.abc import Mapping
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from functional_optim.kernels.totals import sum_in_order
from sharding.shard_plan import ShardPlan
from sharding.transport import Transport, make_transport
from sharding.transport.groups import sub_group
from sharding.transport.peers import ranks_of


def shard_group(group: dist.ProcessGroup, plan: ShardPlan) -> dist.ProcessGroup:
    """The ranks that share one copy of everything with this one. Collective over the group."""
    if plan.replicas == 1:
        return group
    members = ranks_of(group)
    first = group.rank() // plan.shard_ranks * plan.shard_ranks
    return sub_group(group, members[first : first + plan.shard_ranks])


class Transports(dict[torch.device, Transport]):
    """A transport for each device, over one group; made when the device is first seen."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def __missing__(self, device: torch.device) -> Transport:
        self[device] = make_transport(self.group, device)
        return self[device]


def vector_of(addends: Mapping[str, Tensor], plan: ShardPlan) -> Tensor:
    """Return one float64 number for each parameter of a plan; see :func:`vector_at`."""
    return vector_at(addends, {path: plan.index_of(path) for path in addends}, len(plan.specs))


def vectors_of(addends: Mapping[str, Tensor], plan: ShardPlan, numbers: int) -> Tensor:
    """Return a vector for each column, from rows of as many numbers for each parameter."""
    if not numbers:
        return vector_of(addends, plan)
    columns = [{path: row[k] for path, row in addends.items()} for k in range(numbers)]
    return torch.stack([vector_of(one, plan) for one in columns])


def vector_at(addends: Mapping[str, Tensor], places: Mapping[str, int], count: int) -> Tensor:
    """So many float64 numbers: those that have a place, and zeros.

    On the device of the addends where they have one, so that the host need not wait for them; on
    the CPU where they have several, or there are none.
    """
    by_device: dict[torch.device, list[str]] = {}
    for path, addend in addends.items():
        by_device.setdefault(addend.device, []).append(path)
    device = next(iter(by_device)) if len(by_device) == 1 else torch.device("cpu")
    vector = torch.zeros(count, dtype=torch.float64, device=device)
    for paths in by_device.values():  # one journey for each device, not for each number
        values = torch.stack([addends[path].to(torch.float64) for path in paths])
        vector[_indices(tuple(places[path] for path in paths), device)] = values.to(device)
    return vector


@lru_cache(maxsize=512)
def _indices(places: tuple[int, ...], device: torch.device) -> Tensor:
    """Places as a tensor; a device is sent them once, which the host has to wait for."""
    return torch.tensor(places, device=device)


def reduced(
    vector: Tensor, plan: ShardPlan, group: dist.ProcessGroup, device: torch.device
) -> Tensor:
    """The sum of the ranks' vectors; of replicas, one counts."""
    counts = group.rank() < plan.shard_ranks
    moved = (vector if counts else torch.zeros_like(vector)).to(device, copy=True)
    dist.all_reduce(moved, group=group)
    return moved.cpu()


def largest(vector: Tensor, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """The largest of the ranks' numbers, element by element; NaN where one of them is."""
    # A maximum over ranks may lose a NaN, so that travels beside it.
    both = torch.stack([vector.nan_to_num(0.0, math.inf), vector.isnan().double()]).to(device)
    dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    numbers, is_nan = both.cpu()
    found: Tensor = numbers.masked_fill(is_nan != 0.0, math.nan)
    return found


def in_order(vector: Tensor) -> Tensor:
    """Return the sum of a vector, as one process adds up its elements."""
    return sum_in_order(vector.tolist())
