"""Planned steps of some shards, each by the chain of its parameter group."""

from collections.abc import Callable, Sequence
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.core.links import Links
from functional_optim.core.overrides import LeafChain
from functional_optim.core.stage import Link
from functional_optim.frontends.group_steps import CurrentGroups, GroupSteps
from functional_optim.frontends.group_tensors import Gradients, Group
from functional_optim.frontends.recipe import GroupChain
from sharding.zero.local_shard import LocalShard
from sharding.zero.local_shards import LocalShards
from sharding.zero.params import Groups

CPU = torch.device("cpu")


class _Part(NamedTuple):
    """Shards of one group, on one device; with shared scalars, all shards of the group."""

    group: int
    device: torch.device
    tensors: list[Tensor]
    paths: list[str]


class _Unit(NamedTuple):
    """Parts that are stepped together: with the same stages, executor and device, or all parts."""

    parts: list[int]
    chains: list[LeafChain]
    """The chain of each part."""
    links: Links
    steps: GroupSteps


class ShardPlans:
    """Planned steps of some shards of a rank; ``owned`` are all of its shards.

    With shared scalars, one step steps all shards. Every rank makes this step, also without shards,
    because it computes the shared scalars, which depend on the options of all groups.
    """

    def __init__(self, owned: LocalShards, chosen: Sequence[LocalShard]) -> None:
        self._owned = owned
        self._shared = owned.recipes.chains
        found: dict[tuple[int, torch.device], _Part] = {}
        if self._shared is not None:
            keys = [(number, CPU) for number in range(len(self._shared.parts))]
            found = {key: _Part(*key, [], []) for key in keys}
        for one in chosen:
            if not owned.is_frozen(one):
                key = (one.group, one.tensor.device if self._shared is None else CPU)
                part = found.setdefault(key, _Part(*key, [], []))
                part.tensors.append(one.tensor)
                part.paths.append(one.path)
        self._parts = list(found.values())
        self._chains: list[GroupChain] = []
        self._units: list[_Unit] = []

    def prepare(
        self, groups: Groups, gradients: Gradients, measured: Sequence[Tensor]
    ) -> list[Callable[[], object]]:
        """Return the calls that step shards with a gradient, after all checks.

        Args:
            groups: with their current options.
            gradients: returns the gradients of the tensors of shards.
            measured: totals of the stages that need totals.
        """
        return [
            unit.steps.prepare(one, measured)
            for unit, one in self._current_units(groups, gradients)
        ]

    def addends(
        self, groups: Groups, gradients: Gradients, measured: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """Return the addends of shards to the next total, by path."""
        found: dict[str, Tensor] = {}
        for unit, one in self._current_units(groups, gradients):
            added = unit.steps.addends(one, measured)[0]
            found.update(self._owned.sum_by_path(added))
        return found

    def _current_units(
        self, groups: Groups, gradients: Gradients
    ) -> list[tuple[_Unit, CurrentGroups]]:
        """Return each unit, and its shards with their current options and state."""
        self._find_units(groups)
        states, state_of = self._owned.states, self._owned.state_by(groups)
        found = []
        for unit in self._units:
            parts = [self._parts[place] for place in unit.parts]
            own = [
                Group(chain.hypers, part.tensors, part.paths, part.group)
                for part, chain in zip(parts, unit.chains, strict=True)
            ]
            if self._shared is None:
                now = CurrentGroups(own, unit.chains, unit.links, (), states, state_of, gradients)
            else:
                now = self._shared.current_groups(own, states, state_of, gradients)
            found.append((unit, now))
        return found

    def _find_units(self, groups: Groups) -> None:
        """Rebuild units if the chains of groups have changed."""
        chains = [
            self._owned.chain_for(part.group, groups[part.group], part.device.type)
            for part in self._parts
        ]
        if len(chains) == len(self._chains) and all(map(is_, chains, self._chains)):
            return
        if [one[::2] for one in chains] != [one[::2] for one in self._chains]:
            self._units = self._build_units(chains)
        self._chains = chains
        self._units = [_with_hypers(unit, chains) for unit in self._units]

    def _build_units(self, chains: Sequence[GroupChain]) -> list[_Unit]:
        found: dict[tuple[object, ...], _Unit] = {}
        for place, (part, chain) in enumerate(zip(self._parts, chains, strict=True)):
            key = (chain.stages, chain.executor, part.device) if self._shared is None else ()
            unit = found.setdefault(key, _Unit([], [], (), GroupSteps(chain.executor)))
            unit.parts.append(place)
        return list(found.values())


def _with_hypers(unit: _Unit, chains: Sequence[GroupChain]) -> _Unit:
    """Return a unit with the current hyper-parameters."""
    own = [chains[place] for place in unit.parts]
    places = tuple(range(len(own[0].stages)))
    found = [LeafChain(places, one.stages, one.hypers) for one in own]
    return unit._replace(chains=found, links=tuple(map(Link, own[0].stages, own[0].hypers)))
