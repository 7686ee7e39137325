"""Plans of the steps of some shards, each by the chain of its parameter group."""

from collections.abc import Callable, Sequence
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.core.stage import Transform
from functional_optim.core.state import LeafState
from functional_optim.frontends.group_plans import Gradients, GroupPlans
from functional_optim.frontends.recipe import GroupChain
from functional_optim.frontends.torch_flat import Group
from functional_optim.kernels import EXECUTORS
from functional_optim.kernels.totals import measured_each
from functional_optim.plan import reduction
from functional_optim.plan.item import Item
from sharding.zero.local_shard import LocalShard
from sharding.zero.local_shards import LocalShards
from sharding.zero.params import Groups


class _Part(NamedTuple):
    """Shards of one group, on one device."""

    group: int
    device: torch.device
    tensors: list[Tensor]
    paths: list[str]


class _Unit(NamedTuple):
    """Parts that have the same chain and executor: they are stepped together."""

    parts: list[int]
    executor: str
    plans: GroupPlans


class ShardPlans:
    """Plans of the steps of some shards.

    Args:
        owned: all shards of the rank.
        chosen: those that are stepped.
    """

    def __init__(self, owned: LocalShards, chosen: Sequence[LocalShard]) -> None:
        self._owned = owned
        found: dict[tuple[int, torch.device], _Part] = {}
        for one in chosen:
            if not owned.is_frozen(one):
                key = (one.group, one.tensor.device)
                part = found.setdefault(key, _Part(*key, [], []))
                part.tensors.append(one.tensor)
                part.paths.append(one.path)
        self._parts = list(found.values())
        self._chains: list[GroupChain] = []
        self._units: list[_Unit] = []

    def prepared(
        self, groups: Groups, gradients: Gradients, measured: Sequence[Tensor]
    ) -> list[Callable[[], object]]:
        """Return the calls that step shards with a gradient; all errors are raised now.

        Args:
            groups: with the options of now.
            gradients: gives the gradients of what stands for shards.
            measured: totals of measured stages; none to take them of these shards.
        """
        chains = self._chains_of(groups)
        states, state_of = self._owned.states, self._state_of(groups)
        return [
            unit.plans.prepared(
                self._groups(unit, chains), states, state_of, unit.executor, gradients, measured
            )
            for unit in self._units
        ]

    def addends(
        self, groups: Groups, gradients: Gradients, measured: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """Return what shards add to the next total, by path; arguments as for :meth:`prepared`."""
        chains = self._chains_of(groups)
        states, state_of = self._owned.states, self._state_of(groups)
        found: dict[str, Tensor] = {}
        for unit in self._units:
            own = self._groups(unit, chains)
            items = unit.plans.items(own, states, state_of, gradients)
            found.update(_addends(chains[unit.parts[0]], unit.executor, items, measured))
        return found

    def _chains_of(self, groups: Groups) -> list[GroupChain]:
        """Return the chain of each part, and see that units are those of these chains."""
        chains = [
            self._owned.chain_for(part.group, groups[part.group], part.device.type)
            for part in self._parts
        ]
        if len(chains) != len(self._chains) or not all(map(is_, chains, self._chains)):
            if [one[::2] for one in chains] != [one[::2] for one in self._chains]:
                self._units = self._units_of(chains)
            self._chains = chains
        return chains

    def _units_of(self, chains: Sequence[GroupChain]) -> list[_Unit]:
        found: dict[tuple[object, ...], _Unit] = {}
        for place, (part, chain) in enumerate(zip(self._parts, chains, strict=True)):
            key = (chain.stages, chain.executor, part.device)
            unit = found.setdefault(key, _Unit([], chain.executor, GroupPlans(chain.stages)))
            unit.parts.append(place)
        return list(found.values())

    def _groups(self, unit: _Unit, chains: Sequence[GroupChain]) -> list[Group]:
        parts = [self._parts[place] for place in unit.parts]
        return [
            Group(chains[place].hypers, part.tensors, part.paths, part.group)
            for place, part in zip(unit.parts, parts, strict=True)
        ]

    def _state_of(self, groups: Groups) -> Callable[[Group, Tensor, str], LeafState]:
        """Gives the state of a shard; before its first step it is made anew, as torch's is."""

        def found(group: Group, tensor: Tensor, path: str) -> LeafState:
            return self._owned.state_of(tensor, groups)

        return found


def _addends(
    chain: GroupChain, executor: str, items: Sequence[Item], measured: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Return what each parameter adds to the next total, by path."""
    first, grads = chain.stages[0], [item.grad for item in items]
    if isinstance(first, Transform) and not measured and not any(map(torch.is_complex, grads)):
        each = measured_each(first, grads) if first.measure is not None else None
        paths = [item.name for item in items]
        if each is not None and len(set(paths)) == len(paths):
            return dict(zip(paths, each.unbind(), strict=True))
    by_path: dict[str, list[Item]] = {}
    for item in items:
        by_path.setdefault(item.name, []).append(item)
    by = EXECUTORS[executor]
    return {
        path: reduction.measure(chain.stages, by, own, measured) for path, own in by_path.items()
    }
