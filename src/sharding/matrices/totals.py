"""Totals over all gradients, whichever rank has which part: one all_reduce for each."""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from functional_optim.kernels import needs_total
from functional_optim.optimizer import Optimizer
from sharding.matrices.agreement import Attempt, vector_with_failures
from sharding.matrices.owners import Owners
from sharding.zero.groups import in_order

Addends = Callable[[Sequence[Tensor]], Mapping[int, Tensor]]
"""From the totals before to the addends to the next total, by the identity of the stand-in."""


def all_totals(
    owners: Owners, optimizer: Optimizer, addends: Addends, attempt: Attempt
) -> list[Tensor]:
    """Return every total that stages need, the same on all ranks. Collective, where there is any.

    What a matrix adds is measured by its owner and travels as it is; what rows add is summed over
    ranks. Then parameters are added up in the order in which one process adds them up.

    Args:
        owners: of the parameters.
        optimizer: the whole.
        addends: of this rank.
        attempt: of this step.

    Raises:
        Exception: what this rank has failed by.
        RuntimeError: another rank has failed.
    """
    found: list[Tensor] = []
    shards, size = owners.shards, len(owners.params)
    for stage in (one for one in optimizer.stages if needs_total(one)):
        columns = 1 if stage.reduce is None else stage.totals
        own = attempt.make(_own_rows, owners, addends, found, columns)
        rows = torch.zeros(size, columns, dtype=torch.float64, device="cpu") if own is None else own
        vector = vector_with_failures(attempt, shards, rows)
        dist.all_reduce(vector, group=shards.group)
        failed, numbers = vector.cpu().split([shards.size, size * columns])
        attempt.raise_failures(shards, (failed > 0).tolist(), "sum up its gradients")
        sums = [in_order(column) for column in numbers.view(size, columns).unbind(1)]
        found.append(sums[0] if stage.reduce is None else torch.stack(sums))
    return found


def _own_rows(owners: Owners, addends: Addends, before: Sequence[Tensor], columns: int) -> Tensor:
    """Return what this rank adds: a row for each parameter."""
    rows = torch.zeros(len(owners.params), columns, dtype=torch.float64, device="cpu")
    found, by_param = addends(before), owners.stand_ins.by_param
    for place, param in enumerate(owners.params.values()):
        one = by_param.get(id(param))
        if one is not None and one.adds and id(one.tensor) in found:
            rows[place] = found[id(one.tensor)].to("cpu", torch.float64)
    return rows
