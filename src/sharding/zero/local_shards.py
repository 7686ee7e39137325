"""All local shards of one rank, and how they are stepped, in place."""

import threading
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.core.checks import check_measured
from functional_optim.frontends.recipe import Chains, GroupChain
from functional_optim.kernels import is_measured
from sharding.shard_plan import ShardPlan
from sharding.zero.account import Account
from sharding.zero.group_plan import GroupPlan, gradient_of
from sharding.zero.group_recipes import GroupRecipes
from sharding.zero.local_shard import LocalShard
from sharding.zero.parameter_memory import ParameterMemory
from sharding.zero.params import Groups

Gradients = Mapping[str, Sequence[tuple[int, int, Tensor]]]
"""By path of a parameter: elements [start, stop) of it, laid flat, and their gradient."""

PLANS = 64
"""For how many sets of shards plans are kept."""


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
        self.account = Account()
        self._chains = Chains(recipes.of)
        self._memory = memory
        self._rank = rank
        self._lock = threading.RLock()
        self._plans: dict[tuple[LocalShard, ...], GroupPlan] = {}
        self.by_path: dict[str, list[LocalShard]] = {}
        self._by_range: dict[tuple[str, int, int], LocalShard] = {}
        self._bare: list[LocalShard] = []  # without state: not trainable so far
        self._empty: dict[Any, list[LocalShard]] = {}  # with state for options that are off
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
        self._by_range.update({(one.path, one.start, one.stop): one for one in new})
        self._bare += [one for one in new if not self._is_frozen(one)]

    @property
    def measured_stages(self) -> int:
        """Number of sums over all gradients that the chain needs."""
        return sum(map(is_measured, self.recipe.optimizer.stages))

    def every(self) -> Iterable[LocalShard]:
        """All of them."""
        return (shard for shards in self.by_path.values() for shard in shards)

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

    def chain_for(self, number: int, group: Mapping[str, Any], device: str) -> GroupChain:
        """The chain for a group's options, on a type of device."""
        return self._chains.of(number, group, device)

    def moved(self) -> None:
        """Parameters have other memory: the views of what is cut follow."""
        self._plans.clear()
        for one in self.every():
            if not one.whole:
                flat = self._memory.locations[one.path].flat
                assert flat is not None
                one.tensor.data = flat[one.start : one.stop]

    def remake(self, groups: Groups, wanted: Container[str]) -> None:
        """New state where options of these groups ask for another, and for the paths wanted."""
        self._drop(
            [
                one
                for one in self.every()
                if one.state is not None and one.misfit(self.chain_of(one, groups))
            ]
        )
        self.complete(groups, wanted)

    def _drop(self, shards: Sequence[LocalShard]) -> None:
        """Let go of the state of these."""
        for one in shards:
            one.drop()
        if shards:
            self._plans.clear()
            self._bare += shards
            left = {key: [one for one in own if one.state] for key, own in self._empty.items()}
            self._empty = {key: own for key, own in left.items() if own}

    def complete(self, groups: Groups, wanted: Container[str] = ()) -> None:
        """State for every shard that is trainable, has a gradient or is wanted, and has none.

        What has none because an option was off gets it when the option is on, as in torch.
        """
        for own in list(self._empty.values()):
            if own[0].misfit(self.chain_of(own[0], groups)):
                self._drop(own)
        bare, self._bare = self._bare, []
        for one in bare:
            if not (one.wants_state or one.path in wanted or self._of_all(one)):
                self._bare.append(one)
                continue
            one.begin(self.chain_of(one, groups))
            if one.is_empty:
                key = (one.group, one.device, one.tensor.shape, one.tensor.dtype)
                self._empty.setdefault(key, []).append(one)

    def _is_frozen(self, shard: LocalShard) -> bool:
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

    def step(
        self, asked: Sequence[ShardStep], groups: Groups, measured: Sequence[Tensor] = ()
    ) -> None:
        """Step shards, in place. Everything is checked first.

        Raises:
            RuntimeError: a shard that was stepped before in this iteration.
            ValueError: a total that is missing, or what does not fit.
        """
        with self._lock:
            check_measured(self.recipe.optimizer.stages, measured)
            if len(measured) < self.measured_stages:
                raise ValueError(
                    f"this chain needs {self.measured_stages} totals of all ranks' gradients, got "
                    f"{len(measured)}; make them with measure() and total()"
                )
            shards = [one.shard for one in asked]
            self.account.check(shards)
            planned = self._planned(asked, groups)
            for step in [plan.prepared(gradients, measured) for plan, gradients in planned]:
                step()
            self.account.enter(shards)

    def measures(
        self, asked: Sequence[ShardStep], groups: Groups, measured: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """By path, the addend of the next total that the chain needs."""
        if not self.measured_stages:
            raise ValueError("this chain needs no total over all gradients: step_owned is enough")
        check_measured(self.recipe.optimizer.stages, measured, asked=1)
        found: dict[str, Tensor] = {}
        with self._lock, torch.no_grad():
            for plan, gradients in self._planned(asked, groups):
                found.update(plan.measures(gradients, measured))
        return found

    def _planned(
        self, asked: Sequence[ShardStep], groups: Groups
    ) -> list[tuple[GroupPlan, list[Tensor]]]:
        """Plans that step by the options of now. Raises before anything is done."""
        self.complete(groups)
        alike: dict[Any, list[ShardStep]] = {}
        for one in asked:
            if not self._is_frozen(one.shard):
                alike.setdefault((one.shard.group, one.shard.tensor.device), []).append(one)
        found = []
        for own in alike.values():
            key = tuple([one.shard for one in own])
            plan = self._plans.get(key)
            if plan is None:
                if len(self._plans) >= PLANS:
                    self._plans.clear()
                plan = self._plans[key] = GroupPlan(key)
            plan.fit(self.chain_for(plan.group, groups[plan.group], plan.device))
            found.append((plan, [one.grad for one in own]))
        return found
