"""Steps of all that a rank owns by an optimizer that keeps numbers for all parameters.

What is decided for all (shared numbers, gates) is decided on each rank, of the same totals: what
parameters add to these is summed over ranks first. So the numbers are the same on all ranks, and
stand in every group, where state dicts and checkpoints have them.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from functional_optim.core.checks import check_measured
from functional_optim.core.links import has_gates
from functional_optim.core.one_at_a_time import StepLock
from functional_optim.core.stage import Stage
from functional_optim.core.state import LeafState
from functional_optim.frontends.torch_composed import ComposedGroups
from functional_optim.frontends.torch_flat import Entries, Group
from functional_optim.frontends.torch_groups import GroupOptions
from functional_optim.kernels import needs_total
from functional_optim.optimizer import Optimizer
from functional_optim.plan.composed.shared_numbers import shared_by_name
from sharding.zero.group_plan import gradient_of
from sharding.zero.group_recipes import GroupRecipes
from sharding.zero.local_shard import LocalShard
from sharding.zero.local_shards import LocalShards
from sharding.zero.params import Groups

Totals = Callable[[Mapping[str, Tensor], int], Tensor]
"""From the addends of this rank's parameters, by path, to their total over all ranks: of numbers,
for 0, or of rows of so many."""

Show = Callable[[Sequence[LocalShard]], object]
"""Lets the entries of shards be seen, whose state was made anew."""

Given = Mapping[int, Tensor | None]
"""Gradients, by the identity of what stands in the groups."""


class ComposedShards:
    """Steps a rank's shards, all at once.

    Args:
        recipes: what steps each group.
        shards: of the rank.
        show: called with shards whose state was made anew.
    """

    def __init__(self, recipes: GroupRecipes, shards: LocalShards, show: Show) -> None:
        self._shards, self._show, self._recipes = shards, show, recipes
        self._lock = StepLock()
        device = next((one.device for one in shards.every()), "cpu")
        self._composed = ComposedGroups(recipes.whole.made({}, device))
        self._composed.parts = recipes.parts
        self._options: dict[int, tuple[Optimizer, GroupOptions]] = {}
        self._by_tensor: dict[int, LocalShard] = {}
        self._were_trained: set[str] = set()

    def may_change(self, trained: Collection[str]) -> set[str]:
        """The parameters that a step may change; on all ranks the same, whoever owns them.

        A gate may let through what it kept of parameters that are not trained any more.

        Args:
            trained: paths of those that are trained now.
        """
        if not has_gates(self._composed.optimizer.links):
            return {*trained}
        self._were_trained.update(trained)
        return {*self._were_trained}

    def were_trained(self, paths: Iterable[str]) -> None:
        """Be told of parameters that have a state in what was loaded."""
        self._were_trained.update(paths)

    @property
    def totals(self) -> list[Stage]:
        """The stages that need totals over all gradients, in their order."""
        return [stage for stage in self._composed.optimizer.stages if needs_total(stage)]

    @property
    def shared(self) -> dict[str, Any]:
        """The numbers that belong to no parameter, by the name of the stage that keeps them."""
        composed = self._composed
        return shared_by_name(composed.optimizer.links, composed.shared)

    def numbers(self) -> dict[str, Any]:
        """Numbers that belong to no parameter, as groups show them."""
        return self._composed.numbers()

    def show_numbers(self, groups: Sequence[dict[str, Any]]) -> None:
        """Write it into groups."""
        self._composed.show(groups)

    def check_numbers(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Make sure that groups which are to be loaded have it.

        Raises:
            ValueError: some of it is missing, or groups differ.
        """
        self._composed.check_numbers(groups)

    def take_numbers(self, groups: Sequence[dict[str, Any]]) -> None:
        """Take it over from groups that were loaded; plans are forgotten.

        Raises:
            ValueError: some of it is missing, or groups differ; nothing is taken over then.
        """
        self._composed.take_numbers(groups)
        self._composed.forget()

    def step(
        self, groups: Groups, states: Entries, given: Given, measured: Sequence[Tensor]
    ) -> None:
        """Make a step, with interrupts deferred; everything is checked first.

        Args:
            groups: of this rank.
            states: torch's dicts of state.
            given: the gradients.
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
        self._lock.alone(self._step, groups, states, given, measured)

    def measured(
        self, groups: Groups, states: Entries, given: Given, totals: Totals
    ) -> list[Tensor]:
        """All totals that stages need, over all ranks. Collective, where any does."""
        found: list[Tensor] = []
        for _ in self.totals:
            found.append(totals(*self.addends_by_path(groups, states, given, found)))
        return found

    def addends_by_path(
        self, groups: Groups, states: Entries, given: Given, measured: Sequence[Tensor]
    ) -> tuple[dict[str, Tensor], int]:
        """Return the addends of parameters to the next total, by path.

        Returns:
            The addends; and how many numbers a row of them has, 0 where each is one number.

        Raises:
            ValueError: no stage needs one.
        """
        by_path: dict[str, Tensor] = {}
        for shard, added in self.addends(groups, states, given, measured):
            before = by_path.get(shard.path)
            by_path[shard.path] = added if before is None else before + added
        stage = self.totals[len(measured)]
        return by_path, 0 if stage.reduce is None else stage.totals

    def addends(
        self, groups: Groups, states: Entries, given: Given, measured: Sequence[Tensor]
    ) -> list[tuple[LocalShard, Tensor]]:
        """Return the addend of each shard to the next total.

        Raises:
            ValueError: no stage needs one.
        """
        check_measured(self._composed.optimizer.stages, measured, asked=1)
        return self._lock.alone(self._addends, groups, states, given, measured)

    def _step(
        self, groups: Groups, states: Entries, given: Given, measured: Sequence[Tensor]
    ) -> None:
        own = self._groups(groups)
        self._composed.step(own, states, self._state_of(groups), _gradients(given), {}, measured)

    def _addends(
        self, groups: Groups, states: Entries, given: Given, measured: Sequence[Tensor]
    ) -> list[tuple[LocalShard, Tensor]]:
        own, state_of = self._groups(groups), self._state_of(groups)
        found, _ = self._composed.addends(own, states, state_of, _gradients(given), measured)
        by_tensor = self._shards_by_tensor()
        return [(by_tensor[one], added) for one, added in found.items()]

    def _groups(self, groups: Groups) -> list[Group]:
        """Groups with the options of now; of their parameters, those that have state."""
        by_tensor, made = self._shards_by_tensor(), []
        for number, group in enumerate(groups):
            optimizer, _ = self._recipes.parts[number]
            known = self._options.get(number)
            if known is None or known[0] is not optimizer:
                known = optimizer, GroupOptions(optimizer, tuple(optimizer.hyper))
                self._options[number] = known
            own = [by_tensor[id(one)] for one in group["params"]]
            own = [shard for shard in own if shard.state is not None]
            params, paths = [shard.tensor for shard in own], [shard.path for shard in own]
            made.append(Group(known[1].hypers(group), params, paths, number))
        return made

    def _shards_by_tensor(self) -> dict[int, LocalShard]:
        """Return the shards of groups by the identity of their tensors."""
        every = list(self._shards.every())
        if len(every) != len(self._by_tensor):
            self._by_tensor = {id(one.tensor): one for one in every}
        return self._by_tensor

    def _state_of(self, groups: Groups) -> Callable[..., LeafState]:
        """Gives the state of a shard; before its first step it is made anew, as torch's is."""
        by_tensor = self._shards_by_tensor()

        def found(group: Group, param: Tensor, name: str, *, begins: bool = True) -> LeafState:
            shard = by_tensor[id(param)]
            chain = self._shards.chain_of(shard, groups)
            if begins and not shard.has_begun:
                shard.begin(chain)
                self._show([shard])
            return shard.state_for(chain)

        return found


def _gradients(given: Given) -> Callable[[list[Tensor]], list[Tensor | None]]:
    return lambda params: [given.get(id(one)) for one in params]


def gradients_of(shards: Sequence[LocalShard]) -> dict[int, Tensor | None]:
    """The gradients that parameters have, as their shards lie.

    Raises:
        RuntimeError, TypeError, ValueError: one that does not fit.
    """
    return {
        id(one.tensor): gradient_of(one, one.param.grad)
        for one in shards
        if one.param.grad is not None
    }
