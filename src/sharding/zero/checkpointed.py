"""Saving and loading: what checkpoints are of ZeroRedundancyOptimizer."""

from os import PathLike
from typing import Any, NoReturn

import torch
from torch import Tensor

from functional_optim.core.brief import brief
from functional_optim.frontends.torch_checkpoint import with_group_steps
from sharding.shard_plan import ShardPlan
from sharding.zero.parts import OptimizerParts
from sharding.zero.ranges import SteppedByRanges
from sharding.zero.read import read_state_dict
from sharding.zero.shard_state import ShardState
from sharding.zero.sharded_state import sharded_groups, sharded_states
from sharding.zero.state_dict import Collected, collected


class Checkpointed(SteppedByRanges):
    """The part of :class:`~sharding.ZeroRedundancyOptimizer` that saves and loads."""

    _built: bool
    _shard_state: tuple[ShardPlan, ShardState] | None = None

    @property
    def state(self) -> Any:
        """The state that this rank keeps, by parameter: a view, with an entry for each parameter.

        Of a parameter that the rank owns, the entry has the tensors themselves (of a part of a
        parameter, those of the part, in one dimension). Of a parameter that other ranks own, the
        entry is empty: the state of all ranks is what :meth:`consolidate_state_dict` collects.

        Example::

            >>> import torch.distributed as dist
            >>> from sharding import ZeroRedundancyOptimizer
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> weight = torch.nn.Parameter(torch.ones(2))
            >>> zero = ZeroRedundancyOptimizer([weight], torch.optim.Adagrad, lr=0.1)
            >>> zero.state[weight]["sum"]
            tensor([0., 0.])
            >>> dist.destroy_process_group()
        """
        known = self._shard_state
        if known is None or known[0] is not self.plan:
            state = ShardState(self.params, self._tensors, self.optim)
            known = self._shard_state = self.plan, state
        return known[1]

    @state.setter
    def state(self, value: Any) -> None:
        """Refuse another state; torch's constructor sets an empty one.

        Raises:
            AttributeError: always, once the optimizer is made.
        """
        if self._built:
            raise AttributeError(
                "the state of a ZeroRedundancyOptimizer cannot be replaced: each rank keeps a part "
                f"of it; got {brief(value)}; call load_state_dict() on all ranks"
            )

    @property
    def _tensors(self) -> dict[str, list[Tensor]]:
        """By path of a parameter that this rank owns: the parameter, or parts of it."""
        if self._local is None:
            return {one.path: [self.params[one.path]] for one in self.owned}
        every = self._own.by_path.items()
        return {path: [one.tensor for one in shards] for path, shards in every}

    @property
    def _parts(self) -> OptimizerParts:
        return OptimizerParts(
            self.plan,
            self.params,
            self.param_groups,
            self.optim,
            None if self._local is None else self._own,
            self.process_group,
            self.join_device,
        )

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collect the state of all ranks on one, on its CPU, for :meth:`state_dict`. Collective.

        It travels in chunks, as plain tensors: no rank but the target holds more than its share
        and a chunk. The next step lets go of it.

        Args:
            to: the target, by its rank in the process group.

        Raises:
            RuntimeError: another rank could not; names it, and says why.
            TransportError: a rank died, or did not come; names it.
            TypeError: state of a class of one's own that is neither tensor nor plain value.
            ValueError: a rank that there is not.
        """
        self._collected = None
        self._collected = Collected(to, collected(self._parts, to))

    def _check_state_is_here(self) -> None:
        """Raise unless :meth:`state_dict` has something to return."""
        found = self._collected
        if found is not None and found.states is None:
            raise RuntimeError(
                f"the state of all ranks was collected on rank {found.to} of the process group, "
                f"and this is rank {self.rank}: call state_dict() there, or call "
                f"consolidate_state_dict(to={self.rank}) on all ranks. After the next step, "
                "state_dict() has this rank's part"
            )
        if found is None and self._local is None:
            raise RuntimeError(
                f"nothing is known of the state of {type(self.optim).__name__}, so a rank cannot "
                "tell what it has of the state of all ranks: call consolidate_state_dict("
                f"to={self.rank}) on all ranks first"
            )

    def save(self, path: str | PathLike[str]) -> NoReturn:
        """Refuse to save: ``torch.distributed.checkpoint`` writes checkpoints.

        Raises:
            RuntimeError: always; says how to save.
        """
        raise RuntimeError(
            "ZeroRedundancyOptimizer.save() is gone; call torch.distributed.checkpoint.save("
            '{"optim": get_optimizer_state_dict(model, zero)}, storage_writer='
            f"sharding.storage.ChecksumWriter({str(path)!r})) on all ranks, which has files that "
            "every reader of torch loads"
        )

    def load(self, path: str | PathLike[str]) -> None:
        """Load a folder that :meth:`save` wrote before it was replaced. Each rank reads all of it.

        ``functional-optim convert`` rewrites such a folder for ``torch.distributed.checkpoint``,
        by which each rank reads what it owns. This method goes with the next release.

        State that was kept in another storage (see ``functional_optim.stored``) is decoded, and
        encoded as it is kept here, rounded to nearest. What is kept of a bfloat16 parameter needs
        the parameter, so load the module first.

        Args:
            path: the folder.

        Raises:
            FileNotFoundError: no checkpoint was completed there.
            ValueError: other parameters or groups, another optimizer's state, a damaged or missing
                file. Nothing is changed then.
        """
        optimizer: Any = self
        optimizer.load_state_dict(read_state_dict(path))


def with_states(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Put what was collected, or this rank's part, into a state dict, before any other hook."""
    assert isinstance(optimizer, Checkpointed)
    found, parts = optimizer._collected, optimizer._parts  # noqa: SLF001
    whole = None if found is None else found.states
    state: dict[Any, Any] = sharded_states(parts) if whole is None else dict(whole)
    groups = []
    for number, group in enumerate(state_dict["param_groups"]):
        groups.append({**group, **parts.schema_of(number).options})
        if parts.shards is not None and not parts.shards.recipes.of(number).optimizer.links:
            for key in group["params"]:  # frozen: as TorchOptimizer writes it
                state.setdefault(key, {})
    state_dict["state"] = state
    state_dict["param_groups"] = (
        sharded_groups(groups) if whole is None else with_group_steps(whole, groups)
    )
