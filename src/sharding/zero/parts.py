"""Parts of a ZeroRedundancyOptimizer, for the functions that work on all of it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from functional_optim.frontends.recipe import StateDictForm
from sharding.shard_plan import ShardPlan
from sharding.zero.local_shard import LocalShard
from sharding.zero.local_shards import LocalShards


class Ranges(NamedTuple):
    """Some elements of a flat tensor."""

    shape: tuple[int, ...]
    """Of the whole tensor, before it was laid flat."""
    parts: Mapping[int, Tensor]
    """By the first element, contiguous tensors of one dimension."""


class OptimizerParts(NamedTuple):
    """Everything of one optimizer, on this rank."""

    plan: ShardPlan
    params: Mapping[str, Tensor]
    groups: Sequence[dict[str, Any]]
    """The parameter groups of all ranks."""
    optim: torch.optim.Optimizer
    """The optimizer over this rank's shard."""
    shards: LocalShards | None
    """What this rank owns; None where only a class of the user's can step it."""
    process_group: dist.ProcessGroup
    device: torch.device
    """Where the ranks talk."""

    @property
    def rank(self) -> int:
        """This rank."""
        return self.process_group.rank()

    @property
    def schema(self) -> StateDictForm:
        """Return the schema of state dicts."""
        return StateDictForm() if self.shards is None else self.shards.recipe.form

    def schema_of(self, number: int) -> StateDictForm:
        """Return the entries of a parameter group that state dicts hold."""
        return StateDictForm() if self.shards is None else self.shards.recipes.of(number).form

    @property
    def known_shards(self) -> LocalShards:
        """Return the shards that this rank owns.

        Raises:
            RuntimeError: of a class of which nothing is known.
        """
        if self.shards is None:
            raise RuntimeError(
                f"{type(self.optim).__name__} has no functional equivalent, so its state has no "
                "known schema; use consolidate_state_dict and torch.save"
            )
        return self.shards

    def with_state(self) -> Iterator[tuple[LocalShard, dict[str, Tensor]]]:
        """Every shard that has state, and its state as ``.optim`` has it."""
        assert self.shards is not None
        self.shards.complete(self.groups)
        self.shards.link()
        for one in self.shards.with_state():
            yield one, one.entries(self.shards.chain_of(one, self.groups))


def own_state(parts: OptimizerParts) -> dict[str, Ranges]:
    """Return this rank's part of each state tensor, by "path/name".

    A number of a leaf is with the owner of its first element.
    """
    state: dict[str, Ranges] = {}
    for shard, entries in parts.with_state():
        chain = parts.known_shards.chain_of(shard, parts.groups)
        for key, tensor in entries.items():
            shape, start = shard.place_of(chain, key, tensor)
            if start == 0 and shard.start > 0:
                continue
            name = f"{shard.path}/{key}"
            known = state[name].parts if name in state else {}
            state[name] = Ranges(shape, {**known, start: tensor.detach().reshape(-1)})
    return state
