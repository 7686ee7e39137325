"""What a ZeroRedundancyOptimizer consists of, for the functions that work on all of it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from functional_optim.frontends.recipe import Form
from sharding.shard_plan import ShardPlan
from sharding.zero.optim import ShardOptimizer
from sharding.zero.shard import Shard
from sharding.zero.store import Piece


class Parts(NamedTuple):
    """Everything of one optimizer, on this rank."""

    plan: ShardPlan
    params: Mapping[str, Tensor]
    groups: Sequence[dict[str, Any]]
    """The parameter groups of all ranks."""
    optim: torch.optim.Optimizer
    """The optimizer over this rank's shard."""
    shard: Shard | None
    """This rank's shard; None where only a class of the user's can step it."""
    process_group: dist.ProcessGroup
    device: torch.device
    """Where the ranks talk."""

    @property
    def rank(self) -> int:
        """This rank."""
        return self.process_group.rank()

    @property
    def form(self) -> Form:
        """What state dicts look like."""
        return Form() if self.shard is None else self.shard.recipe.form

    def form_of(self, number: int) -> Form:
        """What of a parameter group is in them."""
        return Form() if self.shard is None else self.shard.recipes.of(number).form

    def pieces(self) -> Iterator[tuple[Piece, dict[str, Tensor]]]:
        """Every owned range that has state, and its state as ``.optim`` has it."""
        assert self.shard is not None
        assert isinstance(self.optim, ShardOptimizer)
        self.optim.complete()
        self.optim.adopt()
        for piece in self.shard.every():
            if piece.store is not None:
                chain = self.shard.chain_of(piece, self.groups)
                yield piece, piece.store.entries(piece, chain)
