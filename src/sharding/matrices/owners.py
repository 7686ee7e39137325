"""Owners of sharded matrices, and the stand-ins that this rank steps."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from functional_optim import Optimizer
from functional_optim.engine.stages import Stage
from functional_optim.engine.tensors import can_step_rows, to_local
from sharding.cost import Cost, StepCost
from sharding.matrices.agreement import Attempt
from sharding.matrices.exchange import OwnedMatrix, RowExchange
from sharding.matrices.shard_group import ShardGroup, check_rows, is_cut
from sharding.matrices.stand_ins import StandIn, StandIns, empty_like_whole
from sharding.pieces import NO_PIECES
from sharding.problem import Policy
from sharding.shard_plan import ShardPlan
from sharding.shard_plan import plan as make_plan
from sharding.spec import ParameterSpec
from sharding.transport.groups import device_of
from sharding.zero.groups import Transports
from sharding.zero.params import Groups, group_numbers, specs_of_groups
from sharding.zero.plan import agree_on_plan

ChainOf = Callable[[int], tuple[Sequence[Stage], Sequence[Any]]]
"""Function of the number of a parameter group: the stages of its chain, and their Hypers."""


class Owners:
    """Owners of the matrices of a module, and the stand-ins of this rank.

    Args:
        shards: the ranks that share a copy of the parameters.
        stand_ins: of this rank; new stand-ins are added.
        policy: decides which rank owns which matrix.
        cost: the cost to balance; None for :class:`~sharding.StepCost`.
        optimizer_of: returns the optimizer of a parameter group, by number.
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
        self.transports = Transports(shards.group)
        self._policy = policy
        self._cost = StepCost(lambda spec: optimizer_of(spec.group)) if cost is None else cost
        self.plan = ShardPlan(shards.size, (), NO_PIECES)
        """The plan of all sharded parameters that are stepped as a whole."""
        self.params: dict[str, Tensor] = {}
        """Every parameter, by path, in the order of the parameter groups."""
        self.exchange = RowExchange(shards, ())
        """The exchange of all matrices that may have a gradient."""
        self.idle: dict[str, Tensor] = {}
        """Matrices that never had a gradient, for which nothing is allocated."""

    def extend(self, params: Mapping[str, Tensor], groups: Groups, chain_of: ChainOf) -> None:
        """Find the owners of new parameters, and add stand-ins for them. Collective."""
        numbers = group_numbers(groups)
        new = {path: one for path, one in params.items() if path not in self.params}
        kinds = {number: chain_of(number) for number in {numbers[id(one)] for one in new.values()}}
        matrices = {
            path: one
            for path, one in new.items()
            if is_cut(one) and not can_step_rows(*kinds[numbers[id(one)]])
        }
        specs = specs_of_groups(matrices, groups, ["per_matrix"] * len(groups))
        group = self.shards.group

        def make() -> ShardPlan:
            check_rows(self.shards, new)
            return self._make_plan(specs)

        self.plan = agree_on_plan(group, device_of(group), make)
        for path, one in new.items():
            if path not in matrices and kinds[numbers[id(one)]][0]:
                self._add_local_stand_in(one)
        self.params.update(new)
        self.idle.update(matrices)
        self.activate(path for path, one in matrices.items() if one.requires_grad)

    def _make_plan(self, specs: Sequence[ParameterSpec]) -> ShardPlan:
        if self.plan.specs:
            made = self.plan.extended(specs, policy=self._policy, cost=self._cost)
        else:
            made = make_plan(specs, self.shards.size, self._policy, cost=self._cost)
        if not made.is_whole or made.replicas != 1:
            raise ValueError(
                f"the policy {made.policy!r} cuts parameters or makes replicas, and each matrix is "
                "stepped as a whole by one rank; take 'two_resource' or 'largest_first'"
            )
        return made

    def _add_local_stand_in(self, param: Tensor) -> None:
        """Step the local rows of a parameter; all of it, if it is replicated."""
        own, cut = to_local(param.detach()), is_cut(param)
        if own.numel() or not cut:
            self.stand_ins.add(StandIn(param, own, False, cut or self.shards.rank == 0))

    def activate(self, paths: Iterable[str]) -> None:
        """Allocate matrices on their owners, and gather them. Collective."""
        new = []
        for path in paths:
            param = self.idle.pop(path)
            assert is_cut(param), "only sharded parameters are planned"
            (owners, _, _), *_ = self.plan.owners(path)
            whole = grad = None
            if owners[0] == self.shards.rank:
                whole, grad = empty_like_whole(param), empty_like_whole(param)
                self.stand_ins.add(StandIn(param, whole, True, True))
            rows = self.shards.rows(param.shape[0])
            new.append(OwnedMatrix(path, param, owners[0], rows, whole, grad))
        if new:
            RowExchange(self.shards, new).gather(Attempt().header(), {})
            self.exchange = RowExchange(self.shards, [*self.exchange.matrices, *new])

    def matrices(self) -> set[str]:
        """Return the paths of all matrices."""
        return {spec.path for spec in self.plan.specs}

    def owned(self) -> list[str]:
        """Return the paths of the matrices that this rank owns."""
        return [one.path for one in self.plan.owned(self.shards.rank)]
