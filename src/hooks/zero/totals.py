"""Sums over all gradients, such as a squared norm, from the part of each rank.

Each parameter has a separate number, and all ranks add these numbers in the order of parameters.
So the sum does not depend on buckets or timing; with whole parameters, it does not depend on
owners.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from sharding import ShardPlan
from sharding.transport import Transport
from sharding.zero.groups import vector_of
from sharding.zero.local_shards import Gradients
from sharding.zero.norm import addends_of


def squared_norms(gradients: Gradients, plan: ShardPlan) -> Tensor:
    """Return the sum of squares per parameter, as ``ZeroRedundancyOptimizer.measure`` does."""
    every = ((path, one) for path, ranges in gradients.items() for _, _, one in ranges)
    return vector_of(addends_of(every, 2.0), plan)


def sum_over_ranks(
    addends: Iterable[Tensor],
    plan: ShardPlan,
    transport: Transport,
    device: torch.device,
    summed: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return the sum of all ranks' addends. Collective.

    Each rank adds one range of the parameters, in rank order if the transport does, and sends the
    sums to all ranks. So a rank stores and sends a few numbers per parameter, for any number of
    ranks, and all ranks get the same bits.

    The transport is that of the gathers: DDP starts collectives at any time, and these must not
    mix with this sum.

    Args:
        addends: of this rank, to be added: one number per parameter of the plan, or rows of these.
        plan: the owner of each element.
        transport: over the group.
        device: of the messages.
        summed: adds one number per parameter, or each row of these.

    Returns:
        A float64 tensor, 0-d or with one number per row, the same on all ranks.
    """
    own_addends = list(addends)
    shape = own_addends[0].shape if own_addends else torch.Size([len(plan.specs)])
    count = shape.numel()
    length = -(-count // transport.size)
    ranges = [(rank * length, (rank + 1) * length) for rank in range(transport.size)]
    # NCCL needs ranges of equal length for one collective.
    of_params = torch.zeros(transport.size * length, dtype=torch.float64, device=device)
    # All replicas have the same addends: only the first replica sends them.
    for one in own_addends if transport.rank < plan.shard_ranks else ():
        of_params[:count] += one.flatten().to(device)
    transport.reduce_scatter(of_params, ranges).wait()
    transport.all_gather(of_params, ranges).wait()
    found = of_params[:count].view(shape).cpu()
    return summed(found)
