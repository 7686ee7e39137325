"""Steps of all that a rank owns by an optimizer that keeps numbers for all parameters.

What is decided for all (shared numbers, gates) is decided on each rank, of the same totals: what
parameters add to these is summed over ranks first. So the numbers are the same on all ranks, and
stand in every group, where state dicts and checkpoints have them.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from functional_optim.core.checks import check_measured
from functional_optim.core.links import has_gates
from functional_optim.core.stage import Stage
from functional_optim.frontends.group_chains import GroupChains
from functional_optim.frontends.group_steps import GroupsNow, GroupSteps
from functional_optim.frontends.group_tensors import Gradients, Group
from functional_optim.frontends.torch_groups import GroupOptions
from functional_optim.kernels import needs_total
from functional_optim.optimizer import Optimizer
from functional_optim.plan.shared_numbers import shared_by_name
from sharding.zero.group_recipes import GroupRecipes
from sharding.zero.local_shard import LocalShard
from sharding.zero.local_shards import LocalShards
from sharding.zero.params import Groups


class ComposedShards:
    """Steps a rank's shards, all at once.

    Args:
        recipes: what steps each group.
        shards: of the rank.
    """

    def __init__(self, recipes: GroupRecipes, shards: LocalShards) -> None:
        self._shards, self._recipes = shards, recipes
        device = next((one.device for one in shards.every()), "cpu")
        optimizer = recipes.whole.made({}, device)
        self._chains, self._steps = GroupChains(optimizer), GroupSteps(optimizer.executor)
        self._chains.parts = recipes.parts
        self._options: dict[int, tuple[Optimizer, GroupOptions]] = {}
        self._own: dict[int, list[LocalShard]] = {}
        self._count = -1
        self._were_trained: set[str] = set()

    def may_change(self, trained: Collection[str]) -> set[str]:
        """The parameters that a step may change; on all ranks the same, whoever owns them.

        A gate may let through what it kept of parameters that are not trained any more.

        Args:
            trained: paths of those that are trained now.
        """
        if not has_gates(self._chains.optimizer.links):
            return {*trained}
        self._were_trained.update(trained)
        return {*self._were_trained}

    def were_trained(self, paths: Iterable[str]) -> None:
        """Be told of parameters that have a state in what was loaded."""
        self._were_trained.update(paths)

    @property
    def totals(self) -> list[Stage]:
        """The stages that need totals over all gradients, in their order."""
        return [stage for stage in self._chains.optimizer.stages if needs_total(stage)]

    @property
    def shared(self) -> dict[str, Any]:
        """The numbers that belong to no parameter, by the name of the stage that keeps them."""
        chains = self._chains
        return shared_by_name(chains.optimizer.links, chains.shared)

    def numbers(self) -> dict[str, Any]:
        """Numbers that belong to no parameter, as groups show them."""
        return self._chains.numbers()

    def show_numbers(self, groups: Sequence[dict[str, Any]]) -> None:
        """Write it into groups."""
        self._chains.show(groups)

    def check_numbers(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Make sure that groups which are to be loaded have it.

        Raises:
            ValueError: some of it is missing, or groups differ.
        """
        self._chains.check_numbers(groups)

    def take_numbers(self, groups: Sequence[dict[str, Any]]) -> None:
        """Take it over from groups that were loaded; plans are forgotten.

        Raises:
            ValueError: some of it is missing, or groups differ; nothing is taken over then.
        """
        self._chains.take_numbers(groups)
        self._steps.forget()

    def step(self, groups: Groups, gradients: Gradients, measured: Sequence[Tensor]) -> None:
        """Make a step, with interrupts deferred; everything is checked first.

        Args:
            groups: with the options of now.
            gradients: gives the gradients of what stands for shards.
            measured: all totals that stages need.

        Raises:
            FloatingPointError, TypeError, ValueError: as of any step; a total that is missing.
        """
        wanted = self.totals
        if len(measured) != len(wanted):
            raise ValueError(
                f"this optimizer needs {len(wanted)} totals of all ranks' gradients, got "
                f"{len(measured)}; make them with measure()"
            )
        self._steps.step(self._now(groups, gradients), measured)

    def addends(
        self, groups: Groups, gradients: Gradients, measured: Sequence[Tensor]
    ) -> tuple[dict[str, Tensor], int]:
        """Return the addends of parameters to the next total, by path.

        Returns:
            The addends; and how many numbers a row of them has, 0 where each is one number.

        Raises:
            ValueError: no stage needs one.
        """
        check_measured(self._chains.optimizer.stages, measured, asked=1)
        found, _ = self._steps.addends(self._now(groups, gradients), measured)
        by_path = self._shards.added_by_path(found)
        stage = self.totals[len(measured)]
        return by_path, 0 if stage.reduce is None else stage.totals

    def _now(self, groups: Groups, gradients: Gradients) -> GroupsNow:
        """Return shards as they are at a step."""
        own, state_of = self._groups(groups), self._shards.state_by(groups)
        return self._chains.now(own, self._shards.states, state_of, gradients)

    def _groups(self, groups: Groups) -> list[Group]:
        """Groups with the options of now; of their parameters, those that have state."""
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
        """Return the shards of a group that have state."""
        count = len(self._shards.states)
        if count != self._count:
            self._own, self._count = {}, count
            for one in self._shards.with_state():
                self._own.setdefault(one.group, []).append(one)
        return self._own.get(number, [])
