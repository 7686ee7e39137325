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
from sharding.zero.groups import sum_over_ranks, vector_of
from sharding.zero.local_shards import Gradients
from sharding.zero.norm import addends_of


def squared_norms(gradients: Gradients, plan: ShardPlan) -> Tensor:
    """Return the sum of squares per parameter, as ``ZeroRedundancyOptimizer.measure`` does."""
    every = ((path, one) for path, ranges in gradients.items() for _, _, one in ranges)
    return vector_of(addends_of(every, 2.0), plan)


def total_over_ranks(
    addends: Iterable[Tensor],
    plan: ShardPlan,
    transport: Transport,
    device: torch.device,
    summed: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return the total of all ranks' addends. Collective: see :func:`sum_over_ranks`.

    The transport is that of the gathers: DDP starts collectives at any time, and these must not
    mix with this sum.

    Args:
        addends: of this rank, to be added: one number per parameter of the plan, or rows of these.
        plan, transport, device: as for :func:`sum_over_ranks`.
        summed: adds one number per parameter, or each row of these.

    Returns:
        A float64 tensor, 0-d or with one number per row, the same on all ranks.
    """
    own = list(addends)
    shape = own[0].shape if own else (len(plan.specs),)
    return summed(sum_over_ranks(own, shape, plan, transport, device))
