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
    """The sum of all ranks' addends. Collective.

    It goes over the transport of the gathers: DDP launches collectives of its own, at moments of
    its own, and must not meet this one.

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
    ranges = [(rank * count, (rank + 1) * count) for rank in range(transport.size)]
    every = torch.zeros(transport.size * count, dtype=torch.float64, device=device)
    own = every[slice(*ranges[transport.rank])]
    for one in own_addends:
        own += one.flatten().to(device)
    transport.all_gather(every, ranges).wait()
    # Replicas all have the same; the first of them counts.
    found = every.view(transport.size, *shape)[: plan.shard_ranks].cpu()
    of_params = torch.zeros(shape, dtype=torch.float64, device="cpu")
    for vector in found:
        of_params += vector
    return summed(of_params)
