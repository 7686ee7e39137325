"""All local shards of one rank, and their state."""

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from functional_optim.core.overrides import LeafChain
from functional_optim.core.state import LeafState
from functional_optim.frontends.group_tensors import Group, StateOf
from functional_optim.frontends.recipe import Chains, GroupChain
from functional_optim.plan.shared_numbers import with_common_hypers
from functional_optim.plan.step_counts import beside
from sharding.shard_plan import ShardPlan
from sharding.zero.gradients import gradient_of
from sharding.zero.group_recipes import GroupRecipes
from sharding.zero.local_shard import LocalShard
from sharding.zero.parameter_memory import ParameterMemory
from sharding.zero.params import Groups

Gradients = Mapping[str, Sequence[tuple[int, int, Tensor]]]
"""By path of a parameter: elements [start, stop) of it, laid flat, and their gradient."""


class ShardStep(NamedTuple):
    """A shard to be stepped, and its gradient, as :func:`gradient_of` gives it."""

    shard: LocalShard
    grad: Tensor


class LocalShards:
    """Shards that one rank owns.

    Args:
        recipes: what steps each group.
        memory: where parameters are.
        plan: who owns what.
        rank: this rank.
    """

    def __init__(
        self, recipes: GroupRecipes, memory: ParameterMemory, plan: ShardPlan, rank: int
    ) -> None:
        self.recipes = recipes
        self.recipe = recipes.whole
        self.states: MutableMapping[Tensor, dict[str, Any]] = defaultdict(dict)
        """torch's dicts of state, by what stands in the groups of ``.optim``."""
        self._chains = Chains(recipes.of)
        self._memory = memory
        self._rank = rank
        self.by_path: dict[str, list[LocalShard]] = {}
        self.by_tensor: dict[int, LocalShard] = {}
        """By the identity of what stands for a shard."""
        self.has_cuts = False
        """Whether the rank owns a part of any parameter."""
        self._by_range: dict[tuple[str, int, int], LocalShard] = {}
        self._bare: list[LocalShard] = []  # without state: not trainable so far
        self.extend(plan)

    def extend(self, plan: ShardPlan) -> None:
        """Shards of the parameters that a plan has more than before."""
        found: dict[str, list[LocalShard]] = {}
        for one in plan.owned(self._rank):
            if one.path not in self.by_path:
                location = self._memory.locations[one.path]
                tensor = location.param
                if not one.whole:
                    assert location.flat is not None, "checked when the plan was"
                    tensor = location.flat[one.start : one.stop]
                group = plan.specs[one.parameter].group
                shard = LocalShard(
                    one.path, one.start, one.stop, one.whole, group, location.param, tensor
                )
                found.setdefault(one.path, []).append(shard)
        self.by_path.update(found)
        new = [shard for shards in found.values() for shard in shards]
        self.by_tensor.update({id(one.tensor): one for one in new})
        self._by_range.update({(one.path, one.start, one.stop): one for one in new})
        self.has_cuts = self.has_cuts or not all(one.whole for one in new)
        self._bare += [one for one in new if not self.is_frozen(one)]

    def every(self) -> Iterable[LocalShard]:
        """All of them."""
        return self.by_tensor.values()

    def chain_of(self, shard: LocalShard, groups: Groups) -> GroupChain:
        """Return the chain that steps a shard, with its group's current options."""
        return self._chains.of(shard.group, groups[shard.group], shard.device)

    def check_options(self, number: int, group: Mapping[str, Any]) -> None:
        """See whether a group's options make a chain.

        Raises:
            TypeError, ValueError: they do not.
        """
        for kind in {param.device.type for param in group["params"]}:
            self.chain_for(number, group, kind)

    def check_common_options(self, groups: Groups) -> None:
        """Make sure that groups have the options that shared scalars depend on.

        Raises:
            ValueError: groups differ in such an option.
        """
        if not self.recipes.keeps_numbers:
            return
        chains = []
        for number, (group, (own, places)) in enumerate(
            zip(groups, self.recipes.parts, strict=True)
        ):
            device = next((param.device.type for param in group["params"]), "cpu")
            hypers = self.chain_for(number, group, device).hypers
            chains.append(LeafChain(places, own.stages, hypers))
        with_common_hypers(self.recipes.whole.optimizer.links, chains)

    def chain_for(self, number: int, group: Mapping[str, Any], device: str) -> GroupChain:
        """The chain for a group's options, on a type of device."""
        return self._chains.of(number, group, device)

    def moved(self) -> None:
        """Parameters have other memory: the views of what is cut follow."""
        for one in self.every():
            if not one.whole:
                flat = self._memory.locations[one.path].flat
                assert flat is not None
                one.tensor.data = flat[one.start : one.stop]

    def remake(self, groups: Groups, wanted: Container[str]) -> None:
        """New state where options of these groups ask for another, and for the paths wanted."""
        self.link()
        for one in self.every():
            if one.lacking(self.chain_of(one, groups)):
                one.state = None
                del self.states[one.tensor]
                self._bare.append(one)
        self.complete(groups, wanted)

    def complete(self, groups: Groups, wanted: Container[str] = ()) -> None:
        """State for every shard that is trainable, has a gradient or is wanted, and has none."""
        if not self._bare:
            return
        bare, self._bare, begun = self._bare, [], list[LocalShard]()
        for one in bare:
            chosen = one.wants_state or one.path in wanted or self._of_all(one)
            (begun if chosen else self._bare).append(one)
        for one in begun:
            one.begin(self.chain_of(one, groups))
        for one, count in zip(begun, beside([own["step"] for own in _states(begun)]), strict=True):
            assert one.state is not None, "it has begun"
            one.state["step"] = count  # they lie side by side, so that one look sees them all
            self.states[one.tensor] = one.state

    def link(self) -> None:
        """See the dicts of state that a caller has put in the place of others."""
        for one in self.every():
            one.state = self.states.get(one.tensor)

    def state_of(self, tensor: Tensor, groups: Groups, *, begins: bool = True) -> LeafState:
        """The state of a shard, as its chain of now has it.

        Args:
            tensor: what stands for the shard.
            groups: with the options of now.
            begins: whether this may be its first step, before which its state is made anew.

        Raises:
            ValueError: an entry is missing, or does not fit.
        """
        one = self.by_tensor[id(tensor)]
        chain = self.chain_of(one, groups)
        one.state = self.states.setdefault(tensor, {})
        if begins:
            one.begin_anew(chain)
        return one.state_for(chain)

    def state_by(self, groups: Groups) -> StateOf:
        """Return what gives the state of a shard by its tensor.

        Args:
            groups: with the options of now.
        """

        def found(group: Group, param: Tensor, name: str, *, begins: bool = True) -> LeafState:
            return self.state_of(param, groups, begins=begins)

        return found

    def added_by_path(self, addends: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """Return the sum of the addends of each parameter's shards.

        Args:
            addends: by the identity of what stands for a shard.
        """
        found: dict[str, Tensor] = {}
        for tensor, added in addends.items():
            path = self.by_tensor[tensor].path
            found[path] = found[path] + added if path in found else added
        return found

    def with_state(self) -> Iterator[LocalShard]:
        """Shards that have state."""
        return (one for one in self.every() if one.state is not None)

    def is_frozen(self, shard: LocalShard) -> bool:
        """Return True if no stage acts on a shard: it is never stepped, and has no state."""
        return not self.recipes.of(shard.group).optimizer.links

    def _of_all(self, shard: LocalShard) -> bool:
        """Return True if a shard has state though it is not trained: so has it in torch's class."""
        known = shard.tensor.is_floating_point() or shard.tensor.is_complex()
        return self.recipe.form.frozen and known

    def requests(self, gradients: Gradients) -> list[ShardStep]:
        """Ranges that are this rank's shards, with their gradients.

        Raises:
            ValueError: one that is not, or has a gradient that does not fit.
        """
        found = []
        for path, ranges in gradients.items():
            for start, stop, grad in ranges:
                one = self._by_range.get((path, start, stop))
                if one is None:
                    own = [f"[{one.start}, {one.stop})" for one in self.by_path.get(path, ())]
                    raise ValueError(
                        f"elements [{start}, {stop}) of {path!r} are not this rank's to step: of "
                        f"that parameter it owns {', '.join(own) or 'nothing'}"
                    )
                found.append(ShardStep(one, gradient_of(one, grad)))
        return found


def _states(shards: Iterable[LocalShard]) -> list[dict[str, Any]]:
    return [one.state for one in shards if one.state is not None]
