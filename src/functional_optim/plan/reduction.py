"""Totals over all leaves of a step, with shards summed over ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.capturing import check_not_captured
from functional_optim.core.dtensors import is_sharded, local, whole
from functional_optim.core.leaf import is_measured
from functional_optim.core.local_shards import RankSums, can_step_shards
from functional_optim.core.stage import Stage
from functional_optim.kernels.executor import Executor
from functional_optim.kernels.reference import ReferenceExecutor
from functional_optim.plan.item import Item, Made, on_host
from functional_optim.plan.leaves import leaves_of, on_this_rank, shard_of


def complete(
    stages: Sequence[Stage],
    executor: Executor,
    items: Sequence[Item],
    measured: Sequence[Tensor],
    make: Callable[[Item], Made] | None = None,
) -> Sequence[Tensor]:
    """Return the totals of all measured stages if there are shards, else ``measured``.

    Executors do not sum over ranks. Arguments as for
    :func:`functional_optim.plan.engine.update_`.
    """
    places = [place for place, stage in enumerate(stages) if is_measured(stage)]
    if len(measured) >= len(places) or not any(is_sharded(item.param) for item in items):
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
        own = on_host(stages[:stop]) if make is None else make
        found.append(reduced(stages[:stop], executor, until, found, own))
    return found


def reduced(
    stages: Sequence[Stage],
    executor: Executor,
    items: Sequence[Item],
    measured: Sequence[Tensor],
    make: Callable[[Item], Made],
    sums: RankSums | None = None,
) -> Tensor:
    """Return what these items add to the total, or totals, of the last stage.

    Args:
        stages: up to the stage that needs the total.
        executor: computes the total of a measured stage.
        items: that reach this stage.
        measured: the totals of the measured stages before it.
        make: returns the coefficients of an item.
        sums: collects what shards add; the caller then reduces it over all ranks. None to reduce
            here.

    Returns:
        A 0-d float64 tensor; a vector for a stage with ``reduce``.
    """
    check_not_captured(item.param for item in items)
    parts: dict[Any, list[Item]] = {}
    for item in items:
        key = (item.param.device_mesh, item.param.placements) if is_sharded(item.param) else None
        parts.setdefault(key, []).append(item)
    if parts.keys() == {None}:
        return _reduced_here(stages, executor, items, measured, make)
    rest = parts.pop(None, [])
    total = _reduced_here(stages, executor, rest, measured, make) if rest else None
    found = RankSums() if sums is None else sums
    for own in parts.values():
        like = own[0].param
        if is_sharded(like) and can_step_shards(stages):
            found.add(like, _reduced_shards(stages, executor, own, measured, make))
            continue
        more = _reduced_whole(stages, executor, own, measured, make)
        total = more if total is None else total + more.to(total.device)
    if sums is None:
        total = found.reduced(total)
    return torch.zeros(_shape_of(stages[-1]), dtype=torch.float64) if total is None else total


def _reduced_here(
    stages: Sequence[Stage],
    executor: Executor,
    items: Sequence[Item],
    measured: Sequence[Tensor],
    make: Callable[[Item], Made],
) -> Tensor:
    """Return what tensors of this rank add; arguments as for :func:`reduced`."""
    forms, leaves = leaves_of(stages, items, make)
    entered = [form.enter(leaf) for form, leaf in zip(forms, leaves, strict=True)]
    if stages[-1].reduce is None:
        return executor.measure(stages, entered, measured)
    return ReferenceExecutor().reduce(stages, entered, measured)


def _reduced_shards(
    stages: Sequence[Stage],
    executor: Executor,
    items: Sequence[Item],
    measured: Sequence[Tensor],
    make: Callable[[Item], Made],
) -> Tensor:
    """Return what the shards of this rank add, for a chain that can step shards.

    An empty shard adds nothing, and is skipped: its norm may not exist.
    """
    here = [item for item in map(shard_of, items) if item.param.numel()]
    if here:
        return _reduced_here(stages, executor, here, measured, make)
    device = local(items[0].param).device
    return torch.zeros(_shape_of(stages[-1]), dtype=torch.float64, device=device)


def _reduced_whole(
    stages: Sequence[Stage],
    executor: Executor,
    items: Sequence[Item],
    measured: Sequence[Tensor],
    make: Callable[[Item], Made],
) -> Tensor:
    """Return what DTensors add if a stage needs whole tensors, one DTensor after the other."""
    total: Tensor | None = None
    for item in items:
        own = on_this_rank(stages, executor, [item])
        more = whole(_reduced_here(stages, executor, own, measured, make))
        total = more if total is None else total + more
    assert total is not None
    return total


def _shape_of(stage: Stage) -> tuple[int, ...]:
    """Return the shape of a stage's total."""
    return () if stage.reduce is None else (stage.totals,)
