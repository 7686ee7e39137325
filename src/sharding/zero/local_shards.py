"""All local shards of one rank, and their state."""

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor

from functional_optim.engine.groups import Gradients as GradientsOf
from functional_optim.engine.groups import Group, StatesOf
from functional_optim.engine.recipes import ChainCache, GroupChain
from functional_optim.engine.states import stack_counts
from sharding.shard_plan import ShardPlan
from sharding.zero.group_recipes import GroupRecipes
from sharding.zero.local_shard import LocalShard
from sharding.zero.parameter_memory import ParameterMemory
from sharding.zero.params import Groups

Gradients = Mapping[str, Sequence[tuple[int, int, Tensor]]]
"""By path of a parameter: ranges [start, stop) of its flattened elements, and their gradients."""


class LocalShards:
    """Shards that one rank owns, with their state."""

    def __init__(
        self, recipes: GroupRecipes, memory: ParameterMemory, plan: ShardPlan, rank: int
    ) -> None:
        self.recipes = recipes
        self.states: MutableMapping[Tensor, dict[str, Any]] = defaultdict(dict)
        """torch's dicts of state, by the tensors in the groups of ``.optim``."""
        self.chains = ChainCache(recipes.of)
        self._memory = memory
        self._rank = rank
        self.by_path: dict[str, list[LocalShard]] = {}
        self.by_tensor: dict[int, LocalShard] = {}
        """By the ``id`` of the shard's tensor."""
        self.has_cuts = False
        """True if the rank owns a part of any parameter."""
        self._by_range: dict[tuple[str, int, int], LocalShard] = {}
        self._bare: list[LocalShard] = []  # shards without state
        self.extend(plan)

    def extend(self, plan: ShardPlan) -> None:
        """Add shards of the parameters that are new in a plan."""
        known = {*self.by_path}
        for one in plan.owned(self._rank):
            if one.path in known:
                continue
            location = self._memory.locations[one.path]
            tensor = location.param
            if not one.whole:
                assert location.flat is not None, "checked with the plan"
                tensor = location.flat[one.start : one.stop]
            where = one.path, one.start, one.stop, one.whole, plan.specs[one.parameter].group
            shard = LocalShard(*where, location.param, tensor, self.states)
            self.by_path.setdefault(one.path, []).append(shard)
            self.by_tensor[id(tensor)] = self._by_range[where[:3]] = shard
            self.has_cuts = self.has_cuts or not one.whole
            if not self.is_frozen(shard):
                self._bare.append(shard)

    def every(self) -> Iterable[LocalShard]:
        return self.by_tensor.values()

    def chain_of(self, shard: LocalShard, groups: Groups) -> GroupChain:
        """Return the chain that steps a shard, with its group's current options."""
        return self.chains.of(shard.group, groups[shard.group], shard.tensor.device.type)

    def check_options(self, number: int, group: Mapping[str, Any]) -> None:
        """Raise TypeError or ValueError if no chain can be built with a group's options."""
        for kind in {param.device.type for param in group["params"]}:
            self.chains.of(number, group, kind)

    def check_common_options(self, groups: Groups) -> None:
        """Raise ValueError if groups differ in an option that shared scalars depend on."""
        if self.recipes.chains is not None:
            hypers = [self.chains.of(*one, "cpu").hypers for one in enumerate(groups)]
            every = [Group(own, (), None, number) for number, own in enumerate(hypers)]
            self.recipes.chains.check_common_options(every, ())

    def update_views(self) -> None:
        """Update the views of ranges, after parameters got other memory."""
        for one in self.every():
            if not one.whole:
                flat = self._memory.locations[one.path].flat
                assert flat is not None
                one.tensor.data = flat[one.start : one.stop]

    def rebuild_states(self, groups: Groups, wanted: Container[str]) -> None:
        """Create new state for the wanted paths, and where these options need other entries."""
        for one in self.every():
            if one.missing_entries(self.chain_of(one, groups)):
                one.was_made = False
                del self.states[one.tensor]
                self._bare.append(one)
        self.complete(groups, wanted)

    def complete(self, groups: Groups, wanted: Container[str] = ()) -> None:
        """Create missing state of shards that are trainable, have a gradient, or are wanted."""
        if not self._bare:
            return
        bare, self._bare, begun = self._bare, [], list[LocalShard]()
        for one in bare:
            is_stepped = one.param.requires_grad or one.param.grad is not None
            chosen = is_stepped or one.path in wanted or self._has_frozen_state(one)
            (begun if chosen else self._bare).append(one)
        made = [one.init_entries(self.chain_of(one, groups)) for one in begun]
        counts = stack_counts([own["step"] for own in made])
        for one, own, count in zip(begun, made, counts, strict=True):
            # Counts are adjacent in memory, so that one native call reads all of them.
            self.states[one.tensor] = {**own, "step": count}

    def states_by(self, groups: Groups) -> StatesOf:
        """Return a function that returns the states of shards, from their tensors."""
        own = self.by_tensor
        return lambda group, params, names, begins: [
            own[id(one)].state_for(self.chain_of(own[id(one)], groups), begins=may)
            for one, may in zip(params, begins, strict=True)
        ]

    def sum_by_path(self, addends: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """Return each parameter's addend, from addends by ``id`` of the tensors of its shards."""
        found: dict[str, Tensor] = {}
        for tensor, added in addends.items():
            path = self.by_tensor[tensor].path
            found[path] = found[path] + added if path in found else added
        return found

    def with_state(self) -> Iterator[LocalShard]:
        return (one for one in self.every() if one.has_state)

    def is_frozen(self, shard: LocalShard) -> bool:
        """Return True if no stage acts on a shard: it is never stepped, and has no state."""
        return not self.recipes.of(shard.group).optimizer.links

    def _has_frozen_state(self, shard: LocalShard) -> bool:
        """Return True if a shard has state even if it is not trained, as with torch's class."""
        known = shard.tensor.is_floating_point() or shard.tensor.is_complex()
        return self.recipes.whole.form.frozen and known

    def match_ranges(self, gradients: Gradients) -> tuple[tuple[LocalShard, ...], GradientsOf]:
        """Return the shards of ranges, and a function that returns the gradients of their tensors.

        Raise ValueError for a range that this rank does not own.
        """
        found, given = list[LocalShard](), dict[int, Tensor]()
        for path, ranges in gradients.items():
            for start, stop, grad in ranges:
                one = self._by_range.get((path, start, stop))
                if one is None:
                    own = [f"[{one.start}, {one.stop})" for one in self.by_path.get(path, ())]
                    raise ValueError(
                        f"elements [{start}, {stop}) of {path!r} are not this rank's to step: of "
                        f"that parameter it owns {', '.join(own) or 'nothing'}"
                    )
                found.append(one)
                given[id(one.tensor)] = one.gradient_from(grad)

        def gradients_of(tensors: list[Tensor]) -> list[Tensor | None]:
            return [given.get(id(one)) for one in tensors]

        return tuple(found), gradients_of
