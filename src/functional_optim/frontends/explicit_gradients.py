"""ExplicitGradients: a TorchOptimizer that gets gradients as arguments."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.chain import require_gradients_alone
from functional_optim.core.checks import check_count, check_grad, check_measured
from functional_optim.core.dynamo import disable_compile
from functional_optim.core.stage import Stage
from functional_optim.frontends.group_chains import GroupChains
from functional_optim.frontends.group_options import GroupChain
from functional_optim.frontends.group_tensors import Gradients, Group
from functional_optim.frontends.recipe import ClassRecipe, Recipe
from functional_optim.frontends.step_buckets import BucketMember, StepBucket
from functional_optim.frontends.torch_checkpoint import DECOUPLED
from functional_optim.frontends.torch_groups import params_of_groups
from functional_optim.frontends.torch_optimizer import TorchOptimizer
from functional_optim.kernels import needs_total

BUCKETS = 64
"""Number of buckets for which plans are kept, and number of sets of missing gradients."""


class ExplicitGradients(TorchOptimizer):
    """TorchOptimizer whose steps get gradients as arguments, and do not read ``.grad``.

    It is a :class:`~.local_optimizer.LocalOptimizer`. Its groups have the options of a class, if
    the recipe is that of a class. Such an option may change the stages of a group.
    """

    def __init__(self, params: Iterable[Any], recipe: Recipe) -> None:
        require_gradients_alone(recipe.optimizer, "an optimizer that is given its gradients")
        self._start(params, recipe)

    def _use_chains(self, chains: GroupChains) -> None:
        super()._use_chains(chains)
        self._has_class_options = isinstance(chains.recipe, ClassRecipe)
        self._placed: dict[int, GroupChain] = {}
        """For groups with the options of a class, the chain that :attr:`_chains` has."""
        self._buckets: dict[Hashable, StepBucket] = {}

    @property
    def params(self) -> list[Tensor]:
        """The parameters, group by group. Gradients are in the same order."""
        return params_of_groups(self.param_groups)

    @property
    def state_keys(self) -> set[str]:
        """The keys of groups that are no options: shared scalars, and the step count of a group."""
        return {*self._chains.shared_entries(), *self._recipe.form.options} - {DECOUPLED}

    @property
    def measured_stages(self) -> int:
        """Number of stages that need totals over all gradients."""
        return sum(map(needs_total, self._current_stages))

    @disable_compile
    def step_by(
        self, gradients: Sequence[Tensor | None], *, measured: Sequence[Tensor] = ()
    ) -> None:
        """Run a step. ``.grad`` is neither read nor written."""
        if measured:
            check_measured(self._current_stages, measured)
        self._lock.run(self._step_by, gradients, measured)

    @disable_compile
    def measure(
        self, gradients: Sequence[Tensor | None], *, measured: Sequence[Tensor] = ()
    ) -> Tensor:
        """Return each parameter's addend to the next total that a stage needs."""
        check_measured(self._current_stages, measured, asked=1)
        return self._lock.run(self._measure, gradients, measured)

    def _step_by(self, gradients: Sequence[Tensor | None], measured: Sequence[Tensor]) -> None:
        groups = self._groups()
        self._step_bucket(None, groups, self._by_param(groups, gradients), measured)

    def _measure(self, gradients: Sequence[Tensor | None], measured: Sequence[Tensor]) -> Tensor:
        groups = self._groups()
        by_id, zero = self._addends(None, groups, self._by_param(groups, gradients), measured)
        return torch.stack([by_id.get(id(one), zero).cpu() for one in self.params])

    def _by_param(self, groups: Sequence[Group], gradients: Sequence[Tensor | None]) -> Gradients:
        """Return a function of parameters that returns their gradients, after checks."""
        every = self.params
        check_count(gradients, len(every))
        by_id = dict(zip(map(id, every), gradients, strict=True))
        for group in groups:
            if self._optimizer_of(group.number).stages:
                continue  # the step checks them; it does not check frozen groups
            for param, name in zip(group.params, group.labels(), strict=True):
                grad = by_id[id(param)]
                if grad is not None:
                    check_grad(param, grad, name)

        def gradients_of(params: list[Tensor]) -> list[Tensor | None]:
            return list(map(by_id.__getitem__, map(id, params)))

        return gradients_of

    def __getstate__(self) -> dict[str, Any]:
        own = {"_has_class_options": self._has_class_options, "_placed": {}, "_buckets": {}}
        return {**super().__getstate__(), **own}

    # ------------------------------------------------------------------- some of the parameters

    def _all(self) -> StepBucket:
        """Return the bucket of all parameters."""
        return self._bucket(None)

    def _bucket(
        self, key: Hashable, members_of: Callable[[], Sequence[BucketMember]] | None = None
    ) -> StepBucket:
        """Return the bucket of a key; ``members_of`` returns its members, by default all groups."""
        found = self._buckets.get(key)
        if found is None:
            if len(self._buckets) >= BUCKETS:
                self._buckets.clear()
            members = None if members_of is None else members_of()
            numbers = range(len(self.param_groups)) if members is None else [k for k, *_ in members]
            executors = [self._optimizer_of(number).executor for number in numbers]
            found = self._buckets[key] = StepBucket(members, self._chains, executors, BUCKETS)
        return found

    def _step_bucket(
        self,
        bucket: StepBucket | None,
        groups: Sequence[Group],
        gradients: Gradients,
        measured: Sequence[Tensor] = (),
    ) -> None:
        """Step a bucket, by default all parameters, after all checks; write shared scalars."""
        own = groups, self._states, self._leaf_states, gradients
        every = (bucket or self._all()).current(*own)
        for call in [steps.prepare(now, measured) for steps, now in every]:
            call()
        if self._chains.has_shared:
            self._chains.write_shared(self.param_groups)

    def _addends(
        self,
        bucket: StepBucket | None,
        groups: Sequence[Group],
        gradients: Gradients,
        measured: Sequence[Tensor],
    ) -> tuple[dict[int, Tensor], Tensor]:
        """Return each tensor's addend to the next total, by ``id``, and a zero addend."""
        own = groups, self._states, self._leaf_states, gradients
        found: dict[int, Tensor] = {}
        zero = torch.zeros((), dtype=torch.float64)
        for steps, now in (bucket or self._all()).current(*own):
            added, zero = steps.addends(now, measured)
            found.update(added)
        return found, zero

    # -------------------------------------------------------------------- the options of a class

    @property
    def _current_stages(self) -> tuple[Stage, ...]:
        """The stages of all groups, with their current options."""
        if self._has_class_options:
            with self._lock.lock:
                self._groups()
        return self._chains.optimizer.stages

    def _groups(self) -> list[Group]:
        groups = super()._groups()
        if self._has_class_options:
            readers = enumerate(one.reader for one in self._chains.parts)
            self._place({number: one.latest for number, one in readers if one is not None})
        return groups

    @disable_compile
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as in torch, and create its state. After an error, nothing has changed."""
        try:
            super().add_param_group(param_group)
        except BaseException:  # also KeyboardInterrupt
            self._placed.clear()  # the next group of this number has another chain
            raise

    def _place(self, chains: Mapping[int, GroupChain]) -> None:
        """Replace the chains of groups if an option has changed their stages or executors."""
        known = self._placed
        changed = {number: one for number, one in chains.items() if one is not known.get(number)}
        new = {
            number: one.optimizer
            for number, one in changed.items()
            if number not in known or one[::2] != known[number][::2]
        }
        if new:
            self._chains.replace_parts(new)
            self._steps.forget()
            self._buckets.clear()
        known.update(changed)

    def _stages_of(self, number: int, group: Mapping[str, Any]) -> tuple[Stage, ...]:
        if self._has_class_options:
            self._place({number: self._options_of(number).chain(group)})
        return super()._stages_of(number, group)

    @disable_compile
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a checkpoint of this optimizer or of the equivalent torch.optim class."""
        with self._lock.lock:
            try:
                super().load_state_dict(state_dict)
            finally:
                self._buckets.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return options and state in torch's form, between two steps of other threads."""
        with self._lock.lock:
            return super().state_dict()
