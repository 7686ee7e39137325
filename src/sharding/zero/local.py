"""Local part of the parameter groups, and the optimizer over it."""

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor

from functional_optim.core.brief import brief
from functional_optim.frontends.torch_groups import options_of
from sharding.shard_plan import ShardPlan
from sharding.zero.composed import Totals
from sharding.zero.local_shards import LocalShards
from sharding.zero.optim import ShardOptimizer
from sharding.zero.params import Groups


def local_groups(
    plan: ShardPlan,
    rank: int,
    groups: Groups,
    params: Mapping[str, Tensor],
    shards: LocalShards | None,
) -> list[dict[str, Any]]:
    """This rank's part of every group, empty ones too.

    Args:
        plan: who owns what.
        rank: whose part.
        groups: all of them.
        params: by path.
        shards: what the rank owns, where it may own parts of parameters.
    """
    found: list[dict[str, Any]] = [{**options_of(group), "params": []} for group in groups]
    seen: set[str] = set()
    for one in plan.owned(rank):
        if one.path not in seen:
            seen.add(one.path)
            own = None if shards is None else shards.by_path.get(one.path, [])
            tensors = [params[one.path]] if own is None else [shard.tensor for shard in own]
            # Without names: torch has all groups named or none, and an empty one has no name.
            found[plan.specs[one.parameter].group]["params"] += tensors
    return found


def copy_options(source: Groups, target: Sequence[dict[str, Any]]) -> None:
    """Bring the options of groups to those of others."""
    for one, other in zip(source, target, strict=True):
        other.update(options_of(one))


def shard_optimizer(
    shards: LocalShards, every: Groups, groups: list[dict[str, Any]], totals: Totals
) -> ShardOptimizer:
    """The optimizer over what a rank owns, once the options of all groups are sure to be right."""
    for number, group in enumerate(every):
        shards.check_options(number, group)
    # A copy: torch's load_state_dict adds to it.
    return ShardOptimizer(groups, dict(shards.recipe.defaults), shards, _weakly(totals))


def _weakly(totals: Totals) -> Totals:
    """A method that keeps its owner, and so all parameters, no longer alive than others do."""
    found = WeakMethod(totals)

    def total(addends: Mapping[str, Tensor], numbers: int) -> Tensor:
        method = found()
        if method is None:
            raise RuntimeError(
                "the ZeroRedundancyOptimizer of this shard is gone, and without it gradients are "
                "not summed over ranks; keep it"
            )
        return method(addends, numbers)

    return total


def foreign_optimizer(
    optimizer_class: Any, groups: list[dict[str, Any]], defaults: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """An instance of a class that we know nothing of, over whole parameters.

    Raises:
        TypeError: it is no optimizer.
    """
    made = optimizer_class(groups, **defaults)
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(
            "optimizer_class must make a torch.optim.Optimizer of parameter groups, got "
            f"{brief(made)} from {brief(optimizer_class)}"
        )
    return made
