"""Planned steps of some shards, each by the chain of its parameter group."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim import Optimizer
from functional_optim.engine.groups import (
    CurrentGroups,
    Gradients,
    Group,
    GroupChains,
    GroupSteps,
    waiting_lines,
)
from functional_optim.engine.recipes import GroupChain
from functional_optim.engine.stages import Link
from functional_optim.engine.tensors import grads_of
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
    chains: GroupChains
    """The chain of each part."""
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
        self._kinds: list[tuple[object, str]] = []
        """The stages and the executor of each part."""
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

    def explain(self, groups: Groups) -> str:
        """Return which executor steps which shards: see :meth:`Optimizer.explain`."""
        lines: list[str] = []
        for unit, now in self._current_units(groups, grads_of):
            numbers = [self._parts[place].group for place in unit.parts]
            shown = numbers if len(groups) > 1 else None
            lines += unit.chains.group_lines(now.groups, now.states, shown)
        return "\n".join([*lines, *waiting_lines(self._owned.recipes.whole.optimizer)])

    def _current_units(
        self, groups: Groups, gradients: Gradients
    ) -> list[tuple[_Unit, CurrentGroups]]:
        """Return each unit, and its shards with their current options and state."""
        chains = [
            self._owned.chains.of(part.group, groups[part.group], part.device.type)
            for part in self._parts
        ]
        kinds: list[tuple[object, str]] = [(one.stages, one.executor) for one in chains]
        if kinds != self._kinds:
            self._kinds, self._units = kinds, self._build_units(chains)
        states, states_of = self._owned.states, self._owned.states_by(groups)
        found = []
        for unit in self._units:
            own = [
                Group(chains[place].hypers, self._parts[place].tensors, self._parts[place].paths, k)
                for k, place in enumerate(unit.parts)
            ]
            found.append((unit, unit.chains.current_groups(own, states, states_of, gradients)))
        return found

    def _build_units(self, chains: Sequence[GroupChain]) -> list[_Unit]:
        if self._shared is not None:
            steps = GroupSteps(self._shared.optimizer.executor)
            return [_Unit(list(range(len(chains))), self._shared, steps)]
        found: dict[tuple[object, ...], _Unit] = {}
        for place, (part, chain) in enumerate(zip(self._parts, chains, strict=True)):
            optimizer = Optimizer(tuple(map(Link, chain.stages, chain.hypers)))
            key = (chain.stages, chain.executor, part.device)
            unit = found.setdefault(
                key, _Unit([], GroupChains(optimizer), GroupSteps(chain.executor))
            )
            unit.parts.append(place)
            unit.chains.parts.append((optimizer, tuple(range(len(chain.stages)))))
        return list(found.values())
