"""Parts of a ZeroRedundancyOptimizer, for functions that need several of them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from functional_optim.frontends.recipe import StateDictForm
from sharding.shard_plan import ShardPlan
from sharding.transport import Transport
from sharding.zero.local_shard import LocalShard
from sharding.zero.local_shards import LocalShards


class OptimizerParts(NamedTuple):
    """Parts of one optimizer, on this rank."""

    plan: ShardPlan
    params: Mapping[str, Tensor]
    groups: Sequence[dict[str, Any]]
    """The parameter groups of all ranks."""
    optim: torch.optim.Optimizer
    """The optimizer over this rank's shard."""
    shards: LocalShards | None
    """The shards of this rank; None for a class without functional equivalent."""
    process_group: dist.ProcessGroup
    device: torch.device
    """The device on which ranks communicate."""
    transports: Mapping[torch.device, Transport]
    """Transports over all ranks, by device."""

    @property
    def rank(self) -> int:
        return self.process_group.rank()

    @property
    def schema(self) -> StateDictForm:
        return StateDictForm() if self.shards is None else self.shards.recipe.form

    def schema_of(self, number: int) -> StateDictForm:
        """Return the form of state dicts of a parameter group."""
        return StateDictForm() if self.shards is None else self.shards.recipes.of(number).form

    @property
    def known_shards(self) -> LocalShards:
        """Return the shards. Raise RuntimeError for a class without functional equivalent."""
        if self.shards is None:
            raise RuntimeError(
                f"{type(self.optim).__name__} has no functional equivalent, so its state has no "
                "known schema; use consolidate_state_dict and torch.save"
            )
        return self.shards

    def with_state(self) -> Iterator[tuple[LocalShard, dict[str, Tensor]]]:
        """Yield every shard that has state, and its entries in ``.optim``."""
        assert self.shards is not None
        self.shards.complete(self.groups)
        for one in self.shards.with_state():
            yield one, one.entries(self.shards.chain_of(one, self.groups))
