"""Local optimizer over the shards of one rank, which stay where they are."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.checks import check_count, check_measured
from functional_optim.core.hyper import copy_tensors
from functional_optim.frontends.group_tensors import Gradients
from functional_optim.frontends.torch_groups import options_of, params_of_groups
from functional_optim.kernels import is_measured
from functional_optim.plan.guard import grads_of
from sharding.zero.account import Account
from sharding.zero.composed import ComposedShards
from sharding.zero.gradients import gradient_of, own_gradient_of
from sharding.zero.groups import vector_at
from sharding.zero.local_shard import LocalShard
from sharding.zero.local_shards import LocalShards, ShardStep
from sharding.zero.owned_groups import OwnedGroup
from sharding.zero.shard_plans import ShardPlans

PLANS = 64
"""For how many sets of shards plans are kept."""


class ShardSteps:
    """A :class:`~functional_optim.frontends.local_optimizer.LocalOptimizer` over a rank's shards.

    Both ways to train a ZeroRedundancyOptimizer step by it: after backward, all shards by the
    ``.grad`` of their parameters; from a communication hook, those of a bucket. A gradient is that
    of the whole parameter, or of the shard in one dimension.

    Args:
        shards: of the rank.
        param_groups: the rank's part of each group.

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

    def __init__(self, shards: LocalShards, param_groups: Sequence[OwnedGroup]) -> None:
        self.owned = shards
        """All that the rank owns, by path."""
        self.param_groups: list[Any] = [*param_groups]
        self.account = Account()
        self.composed: ComposedShards | None = None
        """Steps of all shards at once; None if each group is stepped alone."""
        self._lock = threading.RLock()
        self._plans: dict[tuple[LocalShard, ...], ShardPlans] = {}
        self._every: ShardPlans | None = None
        self._count = 0
        """How many shards had state when that was made."""
        if shards.recipes.keeps_numbers:
            self.composed = ComposedShards(shards.recipes, shards)
            self.composed.show_numbers(self.param_groups)
        self.complete()

    @property
    def shards(self) -> list[LocalShard]:
        """Return the shards of the groups, group by group."""
        return [self.owned.by_tensor[id(one)] for one in self.params]

    @property
    def params(self) -> list[Tensor]:
        """Return what stands for the shards in the groups, group by group."""
        return params_of_groups(self.param_groups)

    @property
    def measured_stages(self) -> int:
        """Number of totals over the gradients of all ranks that a step needs."""
        if self.composed is not None:
            return len(self.composed.totals)
        return sum(map(is_measured, self.owned.recipe.optimizer.stages))

    def complete(self) -> None:
        """State for all that is trainable by now."""
        self.owned.complete(self.param_groups)

    def extend(self, groups: Sequence[OwnedGroup]) -> None:
        """Step the shards of more groups, too."""
        self.param_groups += groups
        self._every = None
        self.complete()

    def moved(self) -> None:
        """Parameters have other memory: what is planned is forgotten."""
        self.owned.moved()
        self._every = None
        self._plans.clear()

    def own_gradients(self, tensors: list[Tensor]) -> list[Tensor | None]:
        """Return the ``.grad`` of parameters, as their shards lie.

        Raises:
            RuntimeError: a sparse one, for a part.
        """
        found = grads_of(tensors)
        if self.owned.has_cuts:
            shards = map(self.owned.by_tensor.__getitem__, map(id, tensors))
            for place, one in enumerate(shards):
                if not one.whole:
                    found[place] = own_gradient_of(one)
        return found

    def step(self, gradients: Sequence[Tensor | None], *, measured: Sequence[Tensor] = ()) -> None:
        """Make a step; ``.grad`` is neither read nor written.

        Raises:
            TypeError, ValueError: a gradient or an option that does not fit, a total that is
                missing; nothing is changed then.
        """
        self.step_every(self._given(gradients), measured)

    def measure(
        self, gradients: Sequence[Tensor | None], *, measured: Sequence[Tensor] = ()
    ) -> Tensor:
        """Return each parameter's addend to the next total, in float64, at its first shard.

        A row for each, where a stage needs several.
        """
        by_path, numbers = self.addends(self._given(gradients), measured)
        places: dict[str, int] = {}
        for place, one in enumerate(self.shards):
            places.setdefault(one.path, place)
        count = len(self.params)
        if not numbers:
            return vector_at(by_path, places, count)
        columns = [{path: row[k] for path, row in by_path.items()} for k in range(numbers)]
        return torch.stack([vector_at(one, places, count) for one in columns], dim=1).cpu()

    def step_every(self, gradients: Gradients, measured: Sequence[Tensor]) -> None:
        """Step every shard that has a gradient.

        Args:
            gradients: gives the gradients of what stands for shards.
            measured: all totals that stages need.

        Raises:
            TypeError, ValueError: as for :meth:`step`; nothing is changed then.
        """
        with self._lock:
            self.complete()
            if self.composed is not None:
                self.composed.step(self.param_groups, gradients, measured)
                self.composed.show_numbers(self.param_groups)
                return
            self._check_totals(measured)
            for call in self._of_every().prepared(self.param_groups, gradients, measured):
                call()

    def step_some(self, asked: Sequence[ShardStep], measured: Sequence[Tensor]) -> None:
        """Step shards by given gradients, as part of an iteration's account.

        Where numbers are kept for all parameters, this is a step of all shards: the others have no
        gradient in it.

        Raises:
            RuntimeError: a shard that was stepped before in this iteration.
            TypeError, ValueError: as for :meth:`step`; nothing is changed then.
        """
        shards = tuple([one.shard for one in asked])
        gradients = _by_tensor(asked)
        with self._lock:
            self.account.check(shards)
            if self.composed is not None:
                self.step_every(gradients, measured)
            else:
                self._check_totals(measured)
                self.complete()
                plans = self._of(shards)
                for call in plans.prepared(self.param_groups, gradients, measured):
                    call()
            self.account.enter(shards)

    def addends_of(
        self, asked: Sequence[ShardStep], measured: Sequence[Tensor]
    ) -> tuple[dict[str, Tensor], int]:
        """Return what shards add to the next total, as :meth:`addends` does."""
        shards = tuple([one.shard for one in asked])
        return self.addends(_by_tensor(asked), measured, shards)

    def addends(
        self,
        gradients: Gradients,
        measured: Sequence[Tensor],
        shards: tuple[LocalShard, ...] | None = None,
    ) -> tuple[dict[str, Tensor], int]:
        """Return what shards add to the next total, by path of their parameter.

        Args:
            gradients: gives the gradients of what stands for shards.
            measured: the totals before.
            shards: that have gradients; None for all.

        Returns:
            The addends; and how many numbers a row of them has, 0 where each is one number.

        Raises:
            ValueError: no further total is needed.
        """
        with self._lock, torch.no_grad():
            self.complete()
            if self.composed is not None:
                return self.composed.addends(self.param_groups, gradients, measured)
            if not self.measured_stages:
                raise ValueError("this chain needs no total over all gradients: step without it")
            check_measured(self.owned.recipe.optimizer.stages, measured, asked=1)
            plans = self._of_every() if shards is None else self._of(shards)
            return plans.addends(self.param_groups, gradients, measured), 0

    def state_dict(self) -> dict[str, Any]:
        """Options and state of the shards in torch's form."""
        self.complete()
        numbers = {id(one): number for number, one in enumerate(self.params)}
        states = self.owned.states.items()
        return {
            "state": {numbers[id(tensor)]: entries for tensor, entries in states},
            "param_groups": [
                {**options_of(group), "params": [numbers[id(one)] for one in group["params"]]}
                for group in self.param_groups
            ],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over options and state of these shards; all of it, or nothing where that raises."""
        saved, owned, state = state_dict["param_groups"], self.owned, state_dict["state"]
        sizes = [len(group["params"]) for group in self.param_groups]
        if [len(group["params"]) for group in saved] != sizes:
            raise ValueError(
                f"this state has groups of {[len(group['params']) for group in saved]} parameters, "
                f"the shard has groups of {sizes}; load the state of the same rank of the same plan"
            )
        with self._lock:
            self.complete()
            owned.link()
            groups = [
                {**own, **copy_tensors(options_of(one))}
                for own, one in zip(self.param_groups, saved, strict=True)
            ]
            if self.composed is not None:
                self.composed.check_numbers(groups)
            read = []
            keys = [key for group in saved for key in group["params"]]
            for one, key in zip(self.shards, keys, strict=True):
                chain, entries = owned.chain_of(one, groups), state.get(key) or {}
                if entries or one.state is not None:
                    read.append((one, one.read(chain, entries)))
            for own, group in zip(self.param_groups, groups, strict=True):
                own.update(options_of(group))
            owned.remake(self.param_groups, {one.path for one, _ in read})
            for one, found in read:
                one.write(owned.chain_of(one, self.param_groups), found)
            if self.composed is not None:
                self.composed.take_numbers(self.param_groups)

    def _given(self, gradients: Sequence[Tensor | None]) -> Gradients:
        shards = self.shards
        check_count(gradients, len(shards))
        pairs = zip(shards, gradients, strict=True)
        return _by_tensor(
            [ShardStep(one, gradient_of(one, grad)) for one, grad in pairs if grad is not None]
        )

    def _check_totals(self, measured: Sequence[Tensor]) -> None:
        """Make sure that all totals are given.

        Raises:
            ValueError: some are missing, or too many.
        """
        check_measured(self.owned.recipe.optimizer.stages, measured)
        if len(measured) < self.measured_stages:
            raise ValueError(
                f"this chain needs {self.measured_stages} totals of all ranks' gradients, got "
                f"{len(measured)}; make them with measure() and total()"
            )

    def _of_every(self) -> ShardPlans:
        states, by_tensor = self.owned.states, self.owned.by_tensor
        if self._every is None or len(states) != self._count:
            # In the order of the states, which are then compared by one loop in C.
            first = {id(one): by_tensor[id(one)] for one in states if id(one) in by_tensor}
            shards = {**first, **{id(one.tensor): one for one in self.owned.with_state()}}
            self._every = ShardPlans(self.owned, list(shards.values()))
            self._count = len(states)
        return self._every

    def _of(self, shards: tuple[LocalShard, ...]) -> ShardPlans:
        found = self._plans.get(shards)
        if found is None:
            if len(self._plans) >= PLANS:
                self._plans.clear()
            found = self._plans[shards] = ShardPlans(self.owned, shards)
        return found


def _by_tensor(asked: Sequence[ShardStep]) -> Gradients:
    """Return what gives gradients by the identity of what they are of."""
    given = {id(one.shard.tensor): one.grad for one in asked}

    def found(tensors: list[Tensor]) -> list[Tensor | None]:
        return [given.get(id(one)) for one in tensors]

    return found
