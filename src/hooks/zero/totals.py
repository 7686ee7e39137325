"""Sums over all gradients, such as a squared norm, from each rank's part in them.

Each parameter has a number of its own, and all ranks add the numbers in the order of parameters:
the sum does not depend on buckets or timing, and with whole parameters not on who owns what.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from hooks.zero.bucket import Gradients
from sharding import ShardPlan
from sharding.transport import Transport
from sharding.zero.groups import vector_of
from sharding.zero.norm import addends_of


def squares(gradients: Gradients, plan: ShardPlan) -> Tensor:
    """The sums of squares, as ``ZeroRedundancyOptimizer.measure`` gives what a chain needs."""
    every = ((path, one) for path, ranges in gradients.items() for _, _, one in ranges)
    return vector_of(addends_of(every, 2.0), plan)


def total(
    addends: Iterable[Tensor],
    plan: ShardPlan,
    transport: Transport,
    device: torch.device,
    summed: Callable[[Tensor], Tensor],
) -> Tensor:
    """Add up all ranks' addends. Collective.

    Each rank adds up one range of the parameters, in rank order where the transport does, and sends
    the sums to all ranks. So a rank holds and sends a few numbers for each parameter, however many
    ranks there are, and all ranks have the same bits.

    The sum goes over the transport of the gathers: DDP launches collectives of its own, at moments
    of its own, and must not meet this one.

    Args:
        addends: of this rank, one number for each parameter of the plan, or rows of such; added up.
        plan: who owns what.
        transport: over the group.
        device: on which they travel.
        summed: adds up one number for each parameter, or each row of such.

    Returns:
        A float64 tensor, 0-d or of one number for each row, the same on all ranks.
    """
    own_addends = list(addends)
    shape = own_addends[0].shape if own_addends else torch.Size([len(plan.specs)])
    count = shape.numel()
    length = -(-count // transport.size)
    ranges = [(rank * length, (rank + 1) * length) for rank in range(transport.size)]
    # Ranges of one length are what NCCL takes in one collective.
    of_params = torch.zeros(transport.size * length, dtype=torch.float64, device=device)
    # All replicas have the same addends; those of the first replica count.
    for one in own_addends if transport.rank < plan.shard_ranks else ():
        of_params[:count] += one.flatten().to(device)
    transport.reduce_scatter(of_params, ranges).wait()
    transport.all_gather(of_params, ranges).wait()
    found = of_params[:count].view(shape).cpu()
    return summed(found)
