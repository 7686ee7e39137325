"""Process groups, transports, and sums over ranks of a ZeroRedundancyOptimizer."""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from functional_optim.engine.gradients import sum_in_order
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


def vector_of(addends: Mapping[str, Tensor], plan: ShardPlan, numbers: int = 0) -> Tensor:
    """Return a float64 vector with an entry for each parameter of a plan; see :func:`vector_at`.

    If addends have ``numbers`` elements each, there is a row for each element.
    """
    places = dict(zip(addends, plan.indices_of(addends), strict=True))
    count = len(plan.specs)
    if not numbers:
        return vector_at(addends, places, count)
    columns = [{path: row[k] for path, row in addends.items()} for k in range(numbers)]
    return torch.stack([vector_at(one, places, count) for one in columns])


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
        values = torch.stack(list(map(addends.__getitem__, paths))).to(torch.float64)
        vector[_indices(tuple(map(places.__getitem__, paths)), device)] = values.to(device)
    return vector


@lru_cache(maxsize=512)
def _indices(places: tuple[int, ...], device: torch.device) -> Tensor:
    """Return indices as a tensor, cached, since the host waits for a copy to a device."""
    return torch.tensor(places, device=device)


def sum_over_ranks(
    vectors: Iterable[Tensor],
    shape: Sequence[int],
    plan: ShardPlan,
    transport: Transport,
    device: torch.device,
) -> Tensor:
    """Return the sum of all ranks' vectors, on the CPU; only the first replica counts. Collective.

    Each rank adds one range of the entries, in rank order if the transport does, and sends the sums
    to all ranks. So a rank stores and sends each entry a few times, for any number of ranks, and
    all ranks get the same bits. If a rank does not come, the error names it.

    Args:
        vectors: of this rank, to be added.
        shape: of a vector, the same on all ranks.
        plan: the plan, with its replicas.
        transport: over all ranks of the plan.
        device: of the messages.

    Raises:
        TransportError: a rank died, or did not come; names it, if the backend does.
    """
    count = math.prod(shape)
    length = -(-count // transport.size)
    ranges = [(rank * length, (rank + 1) * length) for rank in range(transport.size)]
    # NCCL needs ranges of equal length for one collective.
    found = torch.zeros(transport.size * length, dtype=torch.float64, device=device)
    # All replicas have the same vectors: only the first replica sends them.
    for one in vectors if transport.rank < plan.shard_ranks else ():
        found[:count] += one.flatten().to(device)
    transport.reduce_scatter(found, ranges).wait()
    transport.all_gather(found, ranges).wait()
    return found[:count].view(*shape).cpu()


def sum_vector(vector: Tensor) -> Tensor:
    """Return the sum of a vector, or of each row, bit for bit as one process sums the elements."""
    if vector.dim() > 1:
        return torch.stack(list(map(sum_vector, vector.unbind())))
    return sum_in_order(vector.tolist())
