"""Owners of sharded matrices, and stand-ins for all that this rank steps."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from functional_optim.core.dtensors import local
from functional_optim.core.local_shards import can_step_rows
from functional_optim.core.stage import Stage
from functional_optim.optimizer import Optimizer
from sharding.cost import Cost, StepCost
from sharding.matrices.agreement import Attempt
from sharding.matrices.exchange import OwnedMatrix, RowExchange
from sharding.matrices.shard_group import ShardGroup, check_rows, is_cut
from sharding.matrices.stand_ins import StandIn, StandIns, empty_like_whole
from sharding.planning import plan as make_plan
from sharding.problem import Policy
from sharding.shard_plan import ShardPlan
from sharding.spec import ParameterSpec
from sharding.transport.groups import device_of
from sharding.zero.planning import agreed, named_policy

ChainOf = Callable[[int], tuple[Sequence[Stage], Sequence[Any]]]
"""From the number of a parameter group to the stages of its chain, and their hyper-parameters."""


class Owners:
    """Owners of the matrices of a module, and the stand-ins of this rank.

    Args:
        shards: the ranks that share a copy of the parameters.
        stand_ins: to which those of this rank are added.
        policy: decides who owns what.
        cost: what is levelled; None for :class:`~sharding.StepCost`.
        optimizer_of: gives the optimizer of the parameter group of a number.
    """

    def __init__(
        self,
        shards: ShardGroup,
        stand_ins: StandIns,
        policy: str | Policy,
        cost: Cost | None,
        optimizer_of: Callable[[int], Optimizer],
    ) -> None:
        self.shards, self.stand_ins = shards, stand_ins
        self._policy = named_policy(policy)
        self._cost = StepCost(lambda spec: optimizer_of(spec.group)) if cost is None else cost
        self.plan: ShardPlan | None = None
        """Of all sharded parameters that are stepped as a whole."""
        self.params: dict[str, Tensor] = {}
        """Every parameter, by path, in the order of the parameter groups."""
        self._exchange = RowExchange(shards, ())
        self._idle: dict[str, Tensor] = {}
        """Matrices without a gradient so far, for which no memory is taken."""

    def extend(
        self, params: Mapping[str, Tensor], numbers: Mapping[int, int], chain_of: ChainOf
    ) -> None:
        """Find the owners of parameters that are new, and step their stand-ins. Collective.

        Args:
            params: every parameter, by path.
            numbers: the number of the parameter group of each, by its identity.
            chain_of: gives the chain of a group.

        Raises:
            ValueError: ranks with different parameters; a policy that cuts parameters.
            RuntimeError: another rank could not make a plan.
        """
        new = {path: one for path, one in params.items() if path not in self.params}
        kinds = {number: chain_of(number) for number in {numbers[id(one)] for one in new.values()}}
        matrices = {
            path: one
            for path, one in new.items()
            if is_cut(one) and not can_step_rows(*kinds[numbers[id(one)]])
        }
        specs = [_spec(path, one, numbers[id(one)]) for path, one in matrices.items()]
        group = self.shards.group

        def planned() -> ShardPlan:
            check_rows(self.shards, new)
            return self._planned(specs)

        self.plan = agreed(group, device_of(group), planned)
        for path, one in new.items():
            if path not in matrices and kinds[numbers[id(one)]][0]:
                self._step_local(one)
        self.params.update(new)
        self._idle.update(matrices)
        self.own(path for path, one in matrices.items() if one.requires_grad)

    def _planned(self, specs: Sequence[ParameterSpec]) -> ShardPlan:
        if self.plan is None:
            made = make_plan(specs, self.shards.size, self._policy, cost=self._cost)
        else:
            made = self.plan.extended(specs, policy=self._policy, cost=self._cost)
        if not made.is_whole or made.replicas != 1:
            raise ValueError(
                f"the policy {made.policy!r} cuts parameters or makes replicas, and each matrix is "
                "stepped as a whole by one rank; take 'two_resource' or 'largest_first'"
            )
        return made

    def _step_local(self, param: Tensor) -> None:
        """Step the rows that this rank holds; of a replicated parameter, all of it."""
        own, cut = local(param.detach()), is_cut(param)
        if own.numel() or not cut:
            self.stand_ins.add(StandIn(param, own, False, cut or self.shards.rank == 0))

    def own(self, paths: Iterable[str]) -> None:
        """Take memory for matrices where they are owned, and gather them. Collective.

        Args:
            paths: the same on all ranks.
        """
        new = []
        for path in paths:
            param = self._idle.pop(path)
            assert self.plan is not None, "made before"
            assert is_cut(param), "only sharded ones are planned"
            (owners, _, _), *_ = self.plan.owners(path)
            matrix = OwnedMatrix(path, param, owners[0], self.shards.rows(param.shape[0]))
            if owners[0] == self.shards.rank:
                whole = empty_like_whole(param)
                matrix = OwnedMatrix(
                    path, param, owners[0], matrix.rows, whole, empty_like_whole(param)
                )
                self.stand_ins.add(StandIn(param, whole, True, True))
            new.append(matrix)
        if new:
            RowExchange(self.shards, new).gather(Attempt().header(), {})
            self._exchange = RowExchange(self.shards, [*self._exchange.matrices, *new])

    @property
    def exchange(self) -> RowExchange:
        """Of all matrices that may have a gradient."""
        return self._exchange

    def late(self, mask: Mapping[str, bool]) -> list[str]:
        """Return the matrices that have a gradient for the first time, and had been frozen."""
        return [path for path in self._idle if mask[path]]

    def matrices(self) -> set[str]:
        """Return the paths of all matrices."""
        assert self.plan is not None, "made before"
        return {spec.path for spec in self.plan.specs}

    def owned(self) -> list[str]:
        """Return the paths of the matrices that this rank owns."""
        assert self.plan is not None, "made before"
        return [one.path for one in self.plan.owned(self.shards.rank)]


def _spec(path: str, param: Tensor, group: int) -> ParameterSpec:
    return ParameterSpec(
        path,
        tuple(param.shape),
        param.dtype,
        param.device.type,
        param.requires_grad,
        "per_matrix",
        group,
    )
