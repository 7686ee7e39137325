"""Totals over all gradients of all ranks: one sum over ranks for each total."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from functional_optim import Optimizer
from functional_optim.engine.stages import needs_total
from sharding.matrices.agreement import Attempt
from sharding.matrices.owners import Owners
from sharding.transport.groups import device_of
from sharding.zero.groups import sum_over_ranks, sum_vector

Addends = Callable[[Sequence[Tensor]], Mapping[int, Tensor]]
"""Function of the totals before: the addends to the next total, by ``id`` of the stand-in."""


def compute_totals(
    owners: Owners, optimizer: Optimizer, addends: Addends, attempt: Attempt
) -> list[Tensor]:
    """Return every total that stages need, the same on all ranks. Collective if there is a total.

    The owner of a matrix computes its addend. The addends of rows are summed over ranks. Then the
    addends of all parameters are summed in the order in which one process sums them. Raise an error
    if this rank or another rank failed, and TransportError that names a rank that did not come.
    """
    found: list[Tensor] = []
    shards, size = owners.shards, len(owners.params)
    device = device_of(shards.group)
    for stage in (one for one in optimizer.stages if needs_total(one)):
        columns = 1 if stage.reduce is None else stage.totals
        own = attempt.run(_local_addends, owners, addends, found, columns)
        rows = torch.zeros(size, columns, dtype=torch.float64, device="cpu") if own is None else own
        failures = torch.zeros(shards.size, dtype=torch.float64, device="cpu")
        failures[shards.rank] = float(attempt.error is not None)
        vector = torch.cat([failures, rows.reshape(-1)])
        transport = owners.transports[device]
        every = sum_over_ranks([vector], vector.shape, owners.plan, transport, device)
        failed, numbers = every.split([shards.size, size * columns])
        attempt.raise_failures(shards, (failed > 0).tolist(), "sum up its gradients")
        sums = sum_vector(numbers.view(size, columns).t())
        found.append(sums[0] if stage.reduce is None else sums)
    return found


def _local_addends(
    owners: Owners, addends: Addends, before: Sequence[Tensor], columns: int
) -> Tensor:
    """Return the addends of this rank: a row for each parameter."""
    rows = torch.zeros(len(owners.params), columns, dtype=torch.float64, device="cpu")
    found, by_param = addends(before), owners.stand_ins.by_param
    for place, param in enumerate(owners.params.values()):
        one = by_param.get(id(param))
        if one is not None and one.adds and id(one.tensor) in found:
            rows[place] = found[id(one.tensor)].to("cpu", torch.float64)
    return rows
