"""State, checkpoints and state dicts of ZeroRedundancyOptimizer."""

from os import PathLike
from typing import Any, NoReturn

import torch
from torch import Tensor

from functional_optim.engine.messages import format_value
from functional_optim.engine.states import with_group_steps
from sharding.shard_plan import ShardPlan
from sharding.zero.full_state_dict import gather_full_state
from sharding.zero.old_checkpoint import read_state_dict
from sharding.zero.range_step_mixin import RangeStepMixin
from sharding.zero.shard_state import ShardState
from sharding.zero.sharded_state_dict import sharded_groups, sharded_states


class CheckpointMixin(RangeStepMixin):
    """Part of :class:`~sharding.ZeroRedundancyOptimizer` that saves and loads."""

    _built: bool
    _shard_state: tuple[ShardPlan, ShardState] | None = None

    @property
    def state(self) -> Any:
        """View of the state that this rank keeps, with an entry for each parameter.

        For an owned parameter, the entry has the tensors themselves; for a part of a parameter,
        they are flat. For a parameter of another rank, the entry is empty.
        :meth:`consolidate_state_dict` collects the state of all ranks.

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
        """Raise, except in torch's constructor, which sets an empty state.

        Raises:
            AttributeError: always, after the constructor.
        """
        if self._built:
            raise AttributeError(
                "the state of a ZeroRedundancyOptimizer cannot be replaced: each rank keeps a part "
                f"of it; got {format_value(value)}; call load_state_dict() on all ranks"
            )

    @property
    def _tensors(self) -> dict[str, list[Tensor]]:
        """Return the tensors in ``.optim`` by path: a whole parameter, or its owned ranges."""
        if self._local is None:
            return {one.path: [self.params[one.path]] for one in self.owned}
        every = self._own.by_path.items()
        return {path: [one.tensor for one in shards] for path, shards in every}

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collect the state of all ranks on one rank's CPU, for :meth:`state_dict`. Collective.

        The state is sent in chunks, as plain tensors. All ranks but the target hold only their own
        part, and a chunk. The next step frees the collected state.

        Args:
            to: the target, by its rank in the process group.

        Raises:
            RuntimeError: another rank failed; names the rank, and its error.
            TransportError: a rank died, or did not come; names it.
            TypeError: the state of a class without functional equivalent has an entry that is
                neither a tensor nor a plain value.
            ValueError: ``to`` is not a rank.
        """
        self._collected = None
        self._collected = to, gather_full_state(self, to)

    def _check_has_state(self) -> None:
        """Raise an error if :meth:`state_dict` cannot return a state on this rank."""
        found = self._collected
        if found is not None and found[1] is None:
            raise RuntimeError(
                f"the state of all ranks was collected on rank {found[0]} of the process group, "
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
        """Raise: ``torch.distributed.checkpoint`` writes checkpoints.

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
        """Load a folder that :meth:`save` of an earlier release wrote. Each rank reads all of it.

        ``functional-optim convert`` rewrites such a folder for ``torch.distributed.checkpoint``,
        with which each rank reads only its part. The next release removes this method.

        State in another storage (see ``functional_optim.stored``) is decoded, and encoded in the
        storage of this optimizer, rounded to nearest. Extra digits of bfloat16 parameters belong to
        the values of the parameters, so load the module first.

        Args:
            path: the folder.

        Raises:
            FileNotFoundError: no checkpoint was completed there.
            ValueError: other parameters or groups, another optimizer's state, a damaged or missing
                file. Nothing has changed.
        """
        optimizer: Any = self
        optimizer.load_state_dict(read_state_dict(path))


def write_states(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Write the collected state, or this rank's part, into a state dict, before any other hook."""
    assert isinstance(optimizer, CheckpointMixin)
    collected, shards = optimizer._collected, optimizer.shards  # noqa: SLF001
    whole = None if collected is None else collected[1]
    state: dict[Any, Any] = sharded_states(optimizer) if whole is None else dict(whole)
    groups = []
    for number, group in enumerate(state_dict["param_groups"]):
        recipe = None if shards is None else shards.chains.recipe_of(number)
        groups.append({**group, **({} if recipe is None else recipe.form.options)})
        if recipe is not None and not recipe.optimizer.links:
            for key in group["params"]:  # frozen: as TorchOptimizer writes it
                state.setdefault(key, {})
    state_dict["state"] = state
    state_dict["param_groups"] = (
        sharded_groups(groups) if whole is None else with_group_steps(whole, groups)
    )
