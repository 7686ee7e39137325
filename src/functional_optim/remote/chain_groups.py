"""Parameter groups in which all parameters have one chain, and checks of their options."""

from collections.abc import Mapping, Sequence
from typing import Any

from functional_optim.engine.groups import GroupChains, LeafChain
from functional_optim.engine.options import (
    FixedGroups,
    guard_schedules,
    missing_flags,
    options_of,
    require_options,
)
from functional_optim.engine.recipes import (
    ComposedRecipe,
    GroupChain,
    OpaqueRecipe,
    Recipe,
)
from functional_optim.engine.stages import Stage, require_gradients_alone
from functional_optim.engine.states import with_common_hypers
from functional_optim.remote.errors import worker_error
from functional_optim.remote.placement import PlacedGroup


class ChainGroups:
    """Parameter groups with one chain each.

    The caller's groups are divided where their parameters have different chains.
    """

    def __init__(self, groups: Sequence[PlacedGroup], recipe: Recipe | OpaqueRecipe) -> None:
        self.params = [one for group in groups for one in group.params]
        """The parameters in the order of the caller."""
        self.groups = list(groups)
        self.recipe = recipe
        """Builds the optimizer of each worker. Can be sent to workers."""
        self._state_keys: tuple[str, ...] = ("step",)
        self._chains: GroupChains | None = None
        """The chains of the groups; None for an opaque class."""
        self._first_stages: dict[int, tuple[Stage, ...]] = {}
        if isinstance(recipe, ComposedRecipe):
            self._divide_groups(recipe)
        elif not isinstance(recipe, OpaqueRecipe):
            self._chains = GroupChains(recipe)
            for group in groups:
                require_options(group.options, recipe.defaults)
                self._chains.add(())
        defaults = {} if self._chains is None else self._chains.recipe.defaults
        options = [{**defaults, **group.options} for group in self.groups]
        self.check_options(options, "the constructor")
        self._fixed = FixedGroups(
            {one.name: one.handle for one in self.params},
            [group.to_torch({}) for group in self.groups],
            fixed="this DistributedOptimizer",
            ways="To stop training a parameter, pass None as its gradient; else make another "
            "optimizer with other groups, and load the state_dict() of this one into it",
        )

    def loaded_options(self, saved: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a saved group, and the flags of the own group that it lacks."""
        found = {key: value for key, value in saved.items() if key not in self._state_keys}
        return {**missing_flags(saved, own), **found}

    def check_step(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Check groups as :meth:`check_options`, and that they have their own parameters."""
        self._fixed.check(groups)
        self.check_options(groups)

    def check_options(self, groups: Sequence[Mapping[str, Any]], what: str = "step") -> None:
        """Check that every worker can step with these options, before any worker steps.

        Each worker computes the shared scalars with the hyper-parameters of its groups, so these
        must be equal in all groups. ``what`` is the operation, for errors.
        """
        own = self._chains
        if own is None:
            return
        errors: dict[str, BaseException] = {}
        chains = []
        for number in range(len(own.parts)):
            try:
                chain = own.reader(number).chain(groups[number])
                chains.append(self._check_stages(number, chain))
            except (TypeError, ValueError) as error:
                lost = {one.worker: error for one in self.groups[number].params}
                errors = {**lost, **errors}
        if errors:
            raise worker_error(what, errors, len({one.worker for one in self.params}))
        if own.divides:
            parts = zip(own.parts, chains, strict=True)
            own_chains = [LeafChain(part.places, one.stages, one.hypers) for part, one in parts]
            with_common_hypers(own.optimizer.links, own_chains)

    def _check_stages(self, number: int, chain: GroupChain) -> GroupChain:
        """Return the chain of a group. Raise ValueError if it has other stages than before."""
        if chain.stages != self._first_stages.setdefault(number, chain.stages):
            raise ValueError(
                f"the options of parameter group {number} need another chain than it was made "
                "with; make another optimizer for them"
            )
        return chain

    def _divide_groups(self, recipe: ComposedRecipe) -> None:
        self.recipe = recipe.list_paths({one.name: one.like for one in self.params})
        require_gradients_alone(recipe.optimizer, "DistributedOptimizer")
        self._chains = divided = GroupChains(recipe)
        self._state_keys = ("step", *divided.shared_entries())
        divided.selectors.are_numbered = not all(group.named for group in self.groups)
        groups, self.groups, first = self.groups, [], 0
        for group in groups:
            placed = {one.name: one for one in group.params}
            pairs = [(one.name, one.like) for one in group.params]
            for part in divided.divide({**group.options, "params": pairs}, first):
                options = options_of(guard_schedules(part.group, part.optimizer.hyper))
                params = [placed[name] for name, _ in part.group["params"]]
                self.groups.append(PlacedGroup(params, options, group.named))
                divided.add((), part)
            first += len(pairs)
        divided.selectors.check()
        for own, group in zip(divided.parts, self.groups, strict=True):
            lacking = [
                stage.name
                for place, stage in enumerate(recipe.optimizer.stages)
                if stage.combine is not None and place not in own.places
            ]
            if own.places and lacking:
                raise TypeError(
                    f"{lacking[0]} keeps numbers for all parameters, and does not act on "
                    f"{group.params[0].name!r}: over workers, it must act on every parameter that "
                    "is not frozen; put it around the partition"
                )
