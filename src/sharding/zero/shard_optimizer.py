"""Optimizer over the shard of one rank, as a torch.optim.Optimizer: ``.optim`` of ZeRO."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn
from weakref import WeakMethod

import torch
from torch import Tensor

from functional_optim._torch.modules import load_state_dict_hooks, with_own_step_hooks
from functional_optim.engine.calls import disable_compile
from functional_optim.engine.groups import (
    BucketMember,
    ExplicitGradients,
    Gradients,
    StepBucket,
)
from functional_optim.engine.options import copy_tensors, options_of, params_of_groups
from functional_optim.engine.stages import has_gates, needs_total
from functional_optim.engine.tensors import check_measured, grads_of
from sharding.zero.local_shard import LocalShard
from sharding.zero.local_shards import LocalShards
from sharding.zero.owned_groups import OwnedGroup

Totals = Callable[[Mapping[str, Tensor], int], Tensor]
"""Function of the addends of this rank's parameters, by path, and of the number of elements of an
addend, 0 for scalars. It returns the total over all ranks."""


class ShardOptimizer(ExplicitGradients):
    """The local optimizer over the shard of one rank; ``ZeroRedundancyOptimizer.optim``.

    Its groups have the parameters that the rank owns as a whole, and flat views of the ranges that
    the rank owns of other parameters. ``state`` has the tensors of the state, without copies.
    Options are those of the groups of the whole optimizer.

    A ZeroRedundancyOptimizer steps all shards after backward, by the ``.grad`` of their parameters,
    and the shards of a bucket from a communication hook, by given gradients.

    Args:
        shards: of the rank.
        param_groups: the rank's part of each group; some may be empty.
        totals: bound method that sums addends over ranks. Only a weak reference is kept, so that
            the parameters of its object can be freed.
    """

    def __init__(
        self, shards: LocalShards, param_groups: Sequence[OwnedGroup], totals: Totals
    ) -> None:
        self._totals = WeakMethod(totals)
        self.owned = shards
        """All shards of the rank."""
        self._own_groups: list[Any] = [*param_groups]
        self._trained: set[str] = set()
        self._count = 0
        """Number of shards with state when the bucket of all shards was made."""
        self._use_chains(shards.chains)
        self._starts = shards.starts
        # torch adds to the defaults, so it gets a copy. It needs a group, which is not used.
        torch.optim.Optimizer.__init__(self, [{"params": []}], dict(self._recipe.defaults))
        self._known = list(self.param_groups)
        self._chains.write_shared(self.param_groups)
        self.complete()

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "the optimizer of a ZeroRedundancyOptimizer over one rank's shard cannot be copied or "
            "pickled, since it steps the memory of these parameters and this process group; make "
            "another ZeroRedundancyOptimizer on all ranks, and load the state_dict() of this one"
        )

    @property
    def state(self) -> Any:
        """Dicts of state as torch has them, by the tensors in the groups."""
        return self.owned.states

    @state.setter
    def state(self, value: Any) -> None:
        """Replace the dicts of state, except by the empty one of torch's constructor."""
        if value:
            given, states = dict(value), self.state
            states.clear()
            states.update(given)

    @property
    def param_groups(self) -> list[Any]:
        """The rank's part of each group; some may be empty."""
        return self._own_groups

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        """Copy the options of other groups."""
        for own, given in zip(self._own_groups, value, strict=False):
            own.update(options_of(given))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise RuntimeError after the constructor: all ranks have to add a group together."""
        if param_group["params"]:
            raise RuntimeError(
                "this is the optimizer over one rank's shard: call add_param_group() of the "
                "ZeroRedundancyOptimizer, on all ranks"
            )

    @with_own_step_hooks  # ZeroRedundancyOptimizer.step calls the global hooks
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every owned range whose parameter has a gradient.

        Other ranks do not get the new values; ``ZeroRedundancyOptimizer.step`` gathers them.

        Args:
            closure: re-evaluates the model and returns the loss; called first, with autograd on.

        Returns:
            The result of the closure, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        measured: list[Tensor] = []
        for _ in range(self.measured_stages):
            measured.append(self._total(*self.measure_shards(self.own_gradients, measured)))
        self.step_shards(self.own_gradients, measured)
        return loss

    def _total(self, addends: Mapping[str, Tensor], numbers: int) -> Tensor:
        method = self._totals()
        if method is None:
            raise RuntimeError(
                "the ZeroRedundancyOptimizer of this shard is gone, and without it gradients are "
                "not summed over ranks; keep it"
            )
        return method(addends, numbers)

    @property
    def steps_at_once(self) -> bool:
        """True if one step steps all shards, because parameters share scalars."""
        return self._chains.has_shared

    def find_changing(self, trained: Collection[str]) -> Collection[str]:
        """Return the parameters that a step may change, from those that are trained now.

        The result is the same on all ranks. With gates, it has parameters that were trained before,
        because a gate may have kept their gradients.
        """
        if not has_gates(self.chain.links):
            return trained
        self._trained.update(trained)
        return {*self._trained}

    def mark_trained(self, paths: Iterable[str]) -> None:
        """Record parameters that have a state in a loaded checkpoint."""
        self._trained.update(paths)

    def complete(self) -> None:
        """Create the state of shards that have become trainable."""
        self.owned.complete(self.param_groups)

    def extend(self, groups: Sequence[OwnedGroup]) -> None:
        """Add the shards of more groups."""
        self._own_groups += groups
        self._known = list(self.param_groups)
        self._buckets.clear()
        self.complete()
        self._chains.write_shared(self.param_groups)

    def update_views(self) -> None:
        """Update shards after parameters got other memory, and delete all plans."""
        self.owned.update_views()
        self._buckets.clear()

    def own_gradients(self, tensors: list[Tensor]) -> list[Tensor | None]:
        """Return the ``.grad`` of parameters, in the shapes of their shards."""
        found = grads_of(tensors)
        if self.owned.has_cuts:
            shards = map(self.owned.by_tensor.__getitem__, map(id, tensors))
            for place, one in enumerate(shards):
                grad = one.param.grad
                if grad is not None and not one.whole:
                    found[place] = one.gradient_from(grad)
        return found

    def step_shards(
        self,
        gradients: Gradients,
        measured: Sequence[Tensor],
        shards: tuple[LocalShard, ...] | None = None,
    ) -> None:
        """Step every shard that has a gradient.

        Args:
            gradients: returns the gradients of the tensors of shards.
            measured: all totals that stages need.
            shards: that have gradients; None for all shards. With shared scalars, all shards are
                stepped, and the other shards have no gradient.

        Raises:
            TypeError, ValueError: a gradient or an option that does not fit, a total that is
                missing. Nothing has changed.
        """

        def step() -> None:
            groups = self._groups()  # first: it replaces buckets and stages
            stages = self._chains.optimizer.stages
            wanted = sum(map(needs_total, stages))
            if len(measured) != wanted:
                raise ValueError(
                    f"this chain needs {wanted} totals of all ranks' gradients, got "
                    f"{len(measured)}; make them with measure() and total()"
                )
            check_measured(stages, measured)
            self._step_bucket(self._bucket_of(shards), groups, gradients, measured)

        self._lock.run(step)

    def measure_shards(
        self,
        gradients: Gradients,
        measured: Sequence[Tensor],
        shards: tuple[LocalShard, ...] | None = None,
    ) -> tuple[dict[str, Tensor], int]:
        """Return the addends of shards to the next total, by path, and their size; 0 for scalars.

        Arguments as for :meth:`step_shards`; ``measured`` are the totals before this one.
        """
        with self._lock.lock, torch.no_grad():
            groups = self._groups()
            stages = [one for one in self._chains.optimizer.stages if needs_total(one)]
            if not stages:
                raise ValueError("this chain needs no total over all gradients: step without it")
            check_measured(self._chains.optimizer.stages, measured, asked=1)
            stage = stages[len(measured)]
            found, _ = self._addends(self._bucket_of(shards), groups, gradients, measured)
        return self.owned.sum_by_path(found), 0 if stage.reduce is None else stage.totals

    def explain(self) -> str:
        """Return which executor steps which shards: see :meth:`Optimizer.explain`."""
        with self._lock.lock:
            every = self._groups()
            groups = self._all().groups(every)
            return self._chains.explain(groups, self._states)

    @disable_compile
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load options and state of this shard. If that raises, nothing has changed."""
        load_with_hooks(self, state_dict, self._load)

    def _load(self, state_dict: Mapping[str, Any]) -> None:
        saved, owned, state = state_dict["param_groups"], self.owned, state_dict["state"]
        sizes = [len(group["params"]) for group in self.param_groups]
        if [len(group["params"]) for group in saved] != sizes:
            raise ValueError(
                f"this state has groups of {[len(group['params']) for group in saved]} parameters, "
                f"the shard has groups of {sizes}; load the state of the same rank of the same plan"
            )
        with self._lock.lock:
            self.complete()
            groups = [
                {**own, **copy_tensors(options_of(one))}
                for own, one in zip(self.param_groups, saved, strict=True)
            ]
            self._chains.check_shared(groups)
            read = []
            keys = params_of_groups(saved)
            shards = [owned.by_tensor[id(one)] for one in params_of_groups(self.param_groups)]
            for one, key in zip(shards, keys, strict=True):
                entries = state.get(key) or {}
                if entries or owned.has_state(one):
                    read.append((one, owned.read(one, groups, entries)))
            for own, group in zip(self.param_groups, groups, strict=True):
                own.update(options_of(group))
            owned.load(self.param_groups, read, {one.path for one, _ in read})
            self.load_shared(self.param_groups)

    def load_shared(self, groups: Sequence[dict[str, Any]]) -> None:
        """Load shared scalars, if there are any, from groups, after checking that all are equal."""
        self._chains.load_shared(groups)
        self._buckets.clear()

    def _bucket_of(self, shards: tuple[LocalShard, ...] | None) -> StepBucket:
        """Return the bucket of some shards, or of all shards: for None, or with shared scalars."""
        if shards is not None and not self.steps_at_once:
            self.complete()
            return self._bucket(shards, lambda: self._members_of(shards))
        return self._all()

    def _all(self) -> StepBucket:
        """Return the bucket of all shards that have state."""
        self.complete()
        if len(self.owned.states) != self._count:
            self._count = len(self.owned.states)
            self._buckets.pop(None, None)
        return self._bucket(None, self._all_members)

    def _all_members(self) -> list[BucketMember]:
        """Return all shards with state, in the order of the states: one native call compares it."""
        states, by_tensor = self.owned.states, self.owned.by_tensor
        first = {id(one): by_tensor[id(one)] for one in states if id(one) in by_tensor}
        every = {**first, **{id(one.tensor): one for one in self.owned.with_state()}}
        return self._members_of(every.values())

    def _members_of(self, shards: Iterable[LocalShard]) -> list[BucketMember]:
        """Return shards by group, without frozen shards.

        With shared scalars, there is an entry for every group, since every rank computes these
        scalars, which depend on the options of all groups.
        """
        found: dict[int, tuple[list[Tensor], list[str]]] = {}
        if self.steps_at_once:
            found = {number: ([], []) for number in range(len(self.param_groups))}
        for one in shards:
            if not self.owned.is_frozen(one):
                tensors, paths = found.setdefault(one.group, ([], []))
                tensors.append(one.tensor)
                paths.append(one.path)
        return [BucketMember(number, *lists) for number, lists in found.items()]


def load_with_hooks(
    optimizer: torch.optim.Optimizer, state_dict: Any, load: Callable[[Any], None]
) -> None:
    """Load a state dict, and call the hooks of an optimizer before and afterwards."""
    before, after = load_state_dict_hooks(optimizer)
    for hook in before:
        state_dict = hook(optimizer, state_dict) or state_dict
    load(state_dict)
    for hook in after:
        hook(optimizer)
