"""Steps of all shards of a rank, for an optimizer with shared scalars or gates.

Shared scalars and gates are equal on all ranks, because each rank computes them from the same
totals over ranks. Parameter groups show the shared scalars, so that checkpoints have them.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import Tensor

from functional_optim.core.checks import check_measured
from functional_optim.core.links import has_gates
from functional_optim.core.stage import Stage
from functional_optim.frontends.group_chains import GroupChains
from functional_optim.frontends.group_steps import CurrentGroups, GroupSteps
from functional_optim.frontends.group_tensors import Gradients, Group
from functional_optim.frontends.torch_groups import GroupOptions
from functional_optim.kernels import needs_total
from functional_optim.optimizer import Optimizer
from functional_optim.plan.shared_numbers import shared_by_name
from sharding.zero.group_recipes import GroupRecipes
from sharding.zero.local_shard import LocalShard
from sharding.zero.local_shards import LocalShards
from sharding.zero.params import Groups


class SharedScalarSteps:
    """Steps of all shards of a rank in one call."""

    def __init__(self, recipes: GroupRecipes, shards: LocalShards) -> None:
        self._shards, self._recipes = shards, recipes
        device = next((one.device for one in shards.every()), "cpu")
        optimizer = recipes.whole.build({}, device)
        self.chains, self._steps = GroupChains(optimizer), GroupSteps(optimizer.executor)
        self.chains.parts = recipes.parts
        self._options: dict[int, tuple[Optimizer, GroupOptions]] = {}
        self._own: dict[int, list[LocalShard]] = {}
        self._count = -1
        self._trained: set[str] = set()

    def find_changing(self, trained: Collection[str]) -> set[str]:
        """Return the parameters that a step may change, from those that are trained now.

        The result is the same on all ranks. It has parameters that were trained before, because a
        gate may have kept their gradients.
        """
        if not has_gates(self.chains.optimizer.links):
            return {*trained}
        self._trained.update(trained)
        return {*self._trained}

    def mark_trained(self, paths: Iterable[str]) -> None:
        """Record parameters that have a state in a loaded checkpoint."""
        self._trained.update(paths)

    @property
    def totals(self) -> list[Stage]:
        """The stages that need totals over all gradients, in their order."""
        return [stage for stage in self.chains.optimizer.stages if needs_total(stage)]

    @property
    def shared(self) -> dict[str, Any]:
        """The shared scalars, by the name of their stage."""
        return shared_by_name(self.chains.optimizer.links, self.chains.shared)

    def load_scalars(self, groups: Sequence[dict[str, Any]]) -> None:
        """Load the shared scalars from groups. Raise ValueError if they differ."""
        self.chains.load_shared(groups)
        self._steps.forget()

    def step(self, groups: Groups, gradients: Gradients, measured: Sequence[Tensor]) -> None:
        """Run a step, with interrupts deferred, after all checks. ``measured`` has all totals."""
        wanted = self.totals
        if len(measured) != len(wanted):
            raise ValueError(
                f"this optimizer needs {len(wanted)} totals of all ranks' gradients, got "
                f"{len(measured)}; make them with measure()"
            )
        self._steps.step(self._current_groups(groups, gradients), measured)

    def addends(
        self, groups: Groups, gradients: Gradients, measured: Sequence[Tensor]
    ) -> tuple[dict[str, Tensor], int]:
        """Return the addends to the next total, by path, and the size of each; 0 for scalars."""
        check_measured(self.chains.optimizer.stages, measured, asked=1)
        found, _ = self._steps.addends(self._current_groups(groups, gradients), measured)
        by_path = self._shards.sum_by_path(found)
        stage = self.totals[len(measured)]
        return by_path, 0 if stage.reduce is None else stage.totals

    def _current_groups(self, groups: Groups, gradients: Gradients) -> CurrentGroups:
        own, state_of = self._groups(groups), self._shards.state_by(groups)
        return self.chains.current_groups(own, self._shards.states, state_of, gradients)

    def _groups(self, groups: Groups) -> list[Group]:
        """Return groups with their current options, and their shards that have state."""
        made = []
        for number, group in enumerate(groups):
            optimizer, _ = self._recipes.parts[number]
            known = self._options.get(number)
            if known is None or known[0] is not optimizer:
                known = optimizer, GroupOptions(optimizer, tuple(optimizer.hyper))
                self._options[number] = known
            own = self._shards_of(number)
            params, paths = [shard.tensor for shard in own], [shard.path for shard in own]
            made.append(Group(known[1].hypers(group), params, paths, number))
        return made

    def _shards_of(self, number: int) -> list[LocalShard]:
        """Return the shards of a group that have state. They are listed again if there are more."""
        count = len(self._shards.states)
        if count != self._count:
            self._own, self._count = {}, count
            for one in self._shards.with_state():
                self._own.setdefault(one.group, []).append(one)
        return self._own.get(number, [])
