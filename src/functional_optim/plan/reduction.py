"""Totals over all leaves of a step, with shards summed over ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.dtensors import full_tensor, is_dtensor, to_local
from functional_optim.core.graph_capture import check_not_captured
from functional_optim.core.leaf import is_measured
from functional_optim.core.local_shards import RankSums, can_step_shards
from functional_optim.core.stage import Stage
from functional_optim.kernels.executor import Executor
from functional_optim.kernels.reference import ReferenceExecutor
from functional_optim.plan.item import Item, StepScalars, on_host
from functional_optim.plan.leaves import leaves_of, on_this_rank, shard_of


def complete(
    stages: Sequence[Stage],
    executor: Executor,
    items: Sequence[Item],
    measured: Sequence[Tensor],
    scalars_of: Callable[[Item], StepScalars] | None = None,
) -> Sequence[Tensor]:
    """Return the totals of all measured stages if there are shards, else ``measured``.

    Executors do not sum over ranks.
    """
    places = [place for place, stage in enumerate(stages) if is_measured(stage)]
    if len(measured) >= len(places) or not any(is_dtensor(item.param) for item in items):
        return measured
    found = list(measured)
    for place in places[len(found) :]:
        stop = place + 1
        until = [
            item._replace(
                hypers=item.hypers[:stop],
                state=item.state._replace(stages=item.state.stages[:stop]),
            )
            for item in items
        ]
        own = on_host(stages[:stop]) if scalars_of is None else scalars_of
        found.append(reduced(stages[:stop], executor, until, found, own))
    return found


def reduced(
    stages: Sequence[Stage],
    executor: Executor,
    items: Sequence[Item],
    measured: Sequence[Tensor],
    scalars_of: Callable[[Item], StepScalars],
    sums: RankSums | None = None,
) -> Tensor:
    """Return what these items add to the total, or totals, of the last of some stages.

    ``sums`` collects what shards add; the caller then reduces it over all ranks. None reduces here.
    The result is a 0-d float64 tensor; a vector for a stage with ``reduce``.
    """
    check_not_captured(item.param for item in items)
    parts: dict[Any, list[Item]] = {}
    for item in items:
        key = (item.param.device_mesh, item.param.placements) if is_dtensor(item.param) else None
        parts.setdefault(key, []).append(item)
    if parts.keys() == {None}:
        return _reduced_here(stages, executor, items, measured, scalars_of)
    rest = parts.pop(None, [])
    total = _reduced_here(stages, executor, rest, measured, scalars_of) if rest else None
    found = RankSums() if sums is None else sums
    for own in parts.values():
        like = own[0].param
        if is_dtensor(like) and can_step_shards(stages):
            found.add(like, _reduced_shards(stages, executor, own, measured, scalars_of))
            continue
        more = _reduced_whole(stages, executor, own, measured, scalars_of)
        total = more if total is None else total + more.to(total.device)
    if sums is None:
        total = found.reduced(total)
    return zero_total(stages[-1]) if total is None else total


def _reduced_here(
    stages: Sequence[Stage],
    executor: Executor,
    items: Sequence[Item],
    measured: Sequence[Tensor],
    scalars_of: Callable[[Item], StepScalars],
) -> Tensor:
    """Return what tensors of this rank add; arguments as for :func:`reduced`."""
    forms, leaves = leaves_of(stages, items, scalars_of)
    entered = [form.enter(leaf) for form, leaf in zip(forms, leaves, strict=True)]
    if stages[-1].reduce is None:
        return executor.measure(stages, entered, measured)
    return ReferenceExecutor().reduce(stages, entered, measured)


def _reduced_shards(
    stages: Sequence[Stage],
    executor: Executor,
    items: Sequence[Item],
    measured: Sequence[Tensor],
    scalars_of: Callable[[Item], StepScalars],
) -> Tensor:
    """Return what the shards of this rank add, for a chain that can step shards.

    An empty shard adds nothing, and is skipped: its norm may not exist.
    """
    here = [item for item in map(shard_of, items) if item.param.numel()]
    if here:
        return _reduced_here(stages, executor, here, measured, scalars_of)
    return zero_total(stages[-1], to_local(items[0].param).device)


def _reduced_whole(
    stages: Sequence[Stage],
    executor: Executor,
    items: Sequence[Item],
    measured: Sequence[Tensor],
    scalars_of: Callable[[Item], StepScalars],
) -> Tensor:
    """Return the addends of DTensors, one by one, for a stage that needs whole tensors."""
    total: Tensor | None = None
    for item in items:
        own = on_this_rank(stages, executor, [item])
        more = full_tensor(_reduced_here(stages, executor, own, measured, scalars_of))
        total = more if total is None else total + more
    assert total is not None
    return total


def zero_total(stage: Stage, device: torch.device | str = "cpu") -> Tensor:
    """Return the total of a stage over no leaves."""
    shape = () if stage.reduce is None else (stage.totals,)
    return torch.zeros(shape, dtype=torch.float64, device=device)
