"""All local shards of one rank, and their state."""

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor

from functional_optim import LeafState
from functional_optim.engine.groups import Gradients as GradientsOf
from functional_optim.engine.groups import Group, GroupChains
from functional_optim.engine.recipes import GroupChain
from functional_optim.engine.states import (
    Start,
    complete_state,
    copy_states,
    entry_layout,
    from_entries,
    leaf_states,
)
from sharding.shard_plan import ShardPlan
from sharding.zero.local_shard import LocalShard
from sharding.zero.parameter_memory import ParameterMemory
from sharding.zero.params import Groups

Gradients = Mapping[str, Sequence[tuple[int, int, Tensor]]]
"""By path of a parameter: ranges [start, stop) of its flattened elements, and their gradients."""


class LocalShards:
    """Shards that one rank owns, with their state."""

    def __init__(
        self, chains: GroupChains, memory: ParameterMemory, plan: ShardPlan, rank: int
    ) -> None:
        self.chains = chains
        """The chain of each group."""
        self.states: MutableMapping[Tensor, dict[str, Any]] = defaultdict(dict)
        """torch's dicts of state, by the tensors in the groups of ``.optim``."""
        self.starts: dict[Tensor, Start] = {}
        """The stages and hyper-parameters for which the state of each tensor was created. A caller
        may have removed the state since, or have set other state."""
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
            shard = LocalShard(*where, location.param, tensor)
            self.by_path.setdefault(one.path, []).append(shard)
            self.by_tensor[id(tensor)] = self._by_range[where[:3]] = shard
            self.has_cuts = self.has_cuts or not one.whole
            if not self.is_frozen(shard):
                self._bare.append(shard)

    def every(self) -> Iterable[LocalShard]:
        return self.by_tensor.values()

    def chain_of(self, shard: LocalShard, groups: Groups) -> GroupChain:
        """Return the chain that steps a shard, with its group's current options."""
        return self.chains.reader(shard.group).chain(groups[shard.group])

    def check_options(self, number: int, group: Mapping[str, Any]) -> None:
        """Raise TypeError or ValueError if no chain can be built with a group's options."""
        self.chains.reader(number).chain(group)

    def check_common_options(self, groups: Groups) -> None:
        """Raise ValueError if groups differ in an option that shared scalars depend on."""
        if self.chains.has_shared:
            numbers = range(len(self.chains.parts))
            every = [Group(self.chains.reader(k).hypers(groups[k]), (), None, k) for k in numbers]
            self.chains.check_common_options(every, ())

    def update_views(self) -> None:
        """Update the views of ranges, after parameters got other memory."""
        for one in self.every():
            if not one.whole:
                flat = self._memory.locations[one.path].flat
                assert flat is not None
                one.tensor.data = flat[one.start : one.stop]

    def complete(self, groups: Groups, wanted: Container[str] = ()) -> None:
        """Create missing state of shards that are trainable, have a gradient, or are wanted."""
        if not self._bare:
            return
        bare, self._bare, begun = self._bare, [], dict[int, list[LocalShard]]()
        for one in bare:
            is_stepped = one.param.requires_grad or one.param.grad is not None
            if is_stepped or one.path in wanted or self._has_frozen_state(one):
                begun.setdefault(one.group, []).append(one)
            else:
                self._bare.append(one)
        for shards in begun.values():
            chain = self.chain_of(shards[0], groups)
            group = {"params": [one.tensor for one in shards]}
            complete_state(chain.stages, chain.hypers, group, self.states)
            for one in shards:
                self.starts[one.tensor] = chain[:2]

    def states_of(
        self, shards: Sequence[LocalShard], groups: Groups, begins: Sequence[bool] | None = None
    ) -> list[LeafState]:
        """Return the states of shards: see :func:`leaf_states`.

        Args:
            groups: with their current options.
            begins: for each shard, True if this may be its first step; by default False.
        """
        kinds: dict[int, list[int]] = {}
        for place, one in enumerate(shards):
            kinds.setdefault(one.group, []).append(place)
        found: dict[int, LeafState] = {}
        for places in kinds.values():
            own = [shards[k] for k in places]
            chain, tensors = self.chain_of(own[0], groups), [one.tensor for one in own]
            may_begin = [begins is not None and begins[k] for k in places]
            given = self.states, [one.path for one in own], may_begin, self.starts
            states = leaf_states(chain.stages, chain.hypers, tensors, *given)
            found.update(zip(places, states, strict=True))
        return [found[k] for k in range(len(shards))]

    def read(self, shard: LocalShard, groups: Groups, entries: Mapping[str, Any]) -> LeafState:
        """Return entries in the shape of a shard, from a state dict, as a checked state."""
        chain = self.chain_of(shard, groups)
        own = chain.stages, chain.hypers, shard.tensor, entries, shard.path
        return from_entries(*own, reinit=True)

    def load(
        self,
        groups: Groups,
        loaded: Sequence[tuple[LocalShard, LeafState]],
        wanted: Container[str],
    ) -> None:
        """Copy loaded states. A state is created where there is none, or options need another.

        Args:
            groups: with the loaded options.
            loaded: states for these options; a frozen shard gets none.
            wanted: paths of parameters that get a state even if they are not trained.
        """
        for one in self.every():
            entries, own = self.states.get(one.tensor), self.chain_of(one, groups)
            like = one.tensor.shape, one.tensor.dtype
            wants = entry_layout(own.stages, own.hypers, *like).dtypes.keys()
            if entries is not None and not wants <= entries.keys():
                del self.states[one.tensor]
                self.starts.pop(one.tensor, None)
                self._bare.append(one)
        self.complete(groups, wanted)
        stateful = [pair for pair in loaded if self.has_state(pair[0])]
        before = self.states_of([one for one, _ in stateful], groups)
        copy_states(before, [state for _, state in stateful])

    def sum_by_path(self, addends: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """Return each parameter's addend, from addends by ``id`` of the tensors of its shards."""
        found: dict[str, Tensor] = {}
        for tensor, added in addends.items():
            path = self.by_tensor[tensor].path
            found[path] = found[path] + added if path in found else added
        return found

    def with_state(self) -> Iterator[LocalShard]:
        return filter(self.has_state, self.every())

    def has_state(self, shard: LocalShard) -> bool:
        """Return True if a shard has state, or had state that the caller removed."""
        return shard.tensor in self.starts or shard.tensor in self.states

    def is_frozen(self, shard: LocalShard) -> bool:
        """Return True if no stage acts on a shard: it is never stepped, and has no state."""
        return not self.chains.parts[shard.group].optimizer.links

    def _has_frozen_state(self, shard: LocalShard) -> bool:
        """Return True if a shard has state even if it is not trained, as with torch's class."""
        known = shard.tensor.is_floating_point() or shard.tensor.is_complex()
        return self.chains.recipe.form.frozen and known

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
