"""What a rank owns as a local optimizer, as every front-end has one."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.checks import check_count
from sharding.zero.groups import vector_at
from sharding.zero.shard import Prepared, Shard
from sharding.zero.store import Piece


class LocalShard:
    """A :class:`~functional_optim.frontends.local_optimizer.LocalOptimizer` over one rank's shard.

    It is given the gradients of what stands in ``param_groups``, group by group: for a part of a
    parameter, that of the whole parameter, or of the part in one dimension.

    Args:
        optim: over the shard, whose state is complete; its groups are those of now.
        shard: what is stepped.

    Example::

        >>> import torch
        >>> import torch.distributed as dist
        >>> from functional_optim import sgd
        >>> from sharding import ZeroRedundancyOptimizer
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> local = ZeroRedundancyOptimizer([weight], sgd(lr=0.5)).optim.local
        >>> local.step([torch.ones(2)])
        >>> weight.tolist()
        [0.5, 0.5]
        >>> dist.destroy_process_group()
    """

    def __init__(self, optim: torch.optim.Optimizer, shard: Shard) -> None:
        self._optim, self._shard = optim, shard
        by_key = {id(piece.key): piece for piece in shard.every()}
        self.pieces: list[Piece] = [
            by_key[id(key)] for group in self.param_groups for key in group["params"]
        ]
        """What stands in the groups."""
        self.places: dict[str, int] = {}
        """By path, where the first piece of each parameter stands."""
        for place, piece in enumerate(self.pieces):
            self.places.setdefault(piece.path, place)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """As in torch: options may be changed between steps."""
        return self._optim.param_groups

    @property
    def measured_stages(self) -> int:
        """How many totals over the gradients of all ranks a step needs."""
        return self._shard.measured_stages

    def step(self, gradients: Sequence[Tensor | None], *, measured: Sequence[Tensor] = ()) -> None:
        """One step; ``.grad`` is neither read nor written.

        Raises:
            TypeError, ValueError: a gradient or an option that does not fit, a total that is
                missing; nothing is changed then.
        """
        self._shard.step(self._asked(gradients), self.param_groups, measured)

    def measure(
        self, gradients: Sequence[Tensor | None], *, measured: Sequence[Tensor] = ()
    ) -> Tensor:
        """What each parameter adds to the next total, in float64; its first part has all of it."""
        found = self._shard.measures(self._asked(gradients), self.param_groups, measured)
        return vector_at(found, self.places, len(self.pieces))

    def state_dict(self) -> dict[str, Any]:
        """Options and state of the shard in torch's form."""
        return self._optim.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over options and state of this shard; all of it, or nothing where that raises."""
        self._optim.load_state_dict(dict(state_dict))

    def _asked(self, gradients: Sequence[Tensor | None]) -> Prepared:
        check_count(gradients, len(self.pieces))
        return self._shard.of_pieces(zip(self.pieces, gradients, strict=True))
