"""The parameters to evaluate with, whole on every rank."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from functional_optim.core.overrides import LeafChain
from functional_optim.plan.leaf_by_leaf import viewed
from functional_optim.plan.step_leaves import StepLeaf
from sharding.zero.local_shard import LocalShard
from sharding.zero.local_shards import LocalShards
from sharding.zero.params import Groups


def viewed_params(
    shards: LocalShards, groups: Groups, params: Iterable[Tensor], gather: Callable[[], object]
) -> list[Tensor]:
    """Return the evaluation value of each parameter, in memory of its own. Collective.

    Each rank writes the views of what it owns in the place of these, all are gathered, and then
    exchanged for what was there: so they take no more memory than the result.

    Args:
        shards: what this rank owns.
        groups: the parameter groups, as they are now.
        params: all parameters, in the order of the result.
        gather: makes every parameter whole on every rank.

    Raises:
        TransportError: a rank died, or did not come; parameters are what they were.
    """
    every = list(params)
    shards.complete(groups)
    shards.link()
    with torch.no_grad():
        views = [(one, _view(one, shards, groups)) for one in shards.with_state()]
        found = [param.detach().clone() for param in every]
        try:
            for shard, view in views:
                shard.tensor.detach().copy_(view)
            gather()
        except BaseException:
            for param, before in zip(every, found, strict=True):
                param.detach().copy_(before)
            raise
        for param, before in zip(every, found, strict=True):
            view = param.detach().clone()
            param.detach().copy_(before)
            before.copy_(view)
    return found


def _view(shard: LocalShard, shards: LocalShards, groups: Groups) -> Tensor:
    """Return the evaluation value of a shard."""
    own = shards.chain_of(shard, groups)
    state = shards.state_of(shard.tensor, groups)
    chain = LeafChain((), own.stages, own.hypers)
    return viewed(StepLeaf(0, shard.tensor.detach(), state, chain, shard.path))
