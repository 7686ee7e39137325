"""Parameter groups as workers have them: divided, where leaves differ in their chains."""

from collections.abc import Mapping, Sequence
from typing import Any

from functional_optim.core.chain import require_gradients_alone
from functional_optim.core.stage import Stage
from functional_optim.core.unmatched_selectors import UnmatchedSelectors
from functional_optim.frontends.group_chains import GroupChains
from functional_optim.frontends.group_parts import GroupPart
from functional_optim.frontends.local_optimizer import Foreign
from functional_optim.frontends.recipe import Chains, ComposedRecipe, GroupChain, Recipe
from functional_optim.frontends.torch_groups import neutral_flags, options_of, require_options
from functional_optim.frontends.torch_schedule import guarded
from functional_optim.plan.shared_numbers import common_hyper
from functional_optim.remote.errors import failed
from functional_optim.remote.placing import PlacedGroup


class Arranged:
    """Groups of one chain each, and what all workers must agree on.

    Args:
        groups: of the caller.
        found: what makes the optimizer of each worker.

    Raises:
        TypeError: a stage that needs inputs beside the gradients, or keeps numbers for some
            parameters only; an option that the optimizer does not have.
        ValueError: groups that differ in what such numbers are made by; an override that is meant
            for no parameter.
        WorkerError: options of a group that make no chain.
    """

    def __init__(self, groups: Sequence[PlacedGroup], found: Recipe | Foreign) -> None:
        self.given = [one for group in groups for one in group.params]
        """The parameters in the order of the caller."""
        self.groups = list(groups)
        self.found = found
        """What makes the optimizer of each worker, in a form that can be sent."""
        self._beside: tuple[str, ...] = ("step",)
        self._shared: list[int] = []
        self._parts: list[GroupPart] = []
        self._recipes: list[Recipe] = []
        self._chains = Chains(lambda number: self._recipes[number])
        self._first: dict[int, tuple[Stage, ...]] = {}
        if isinstance(found, ComposedRecipe):
            self._divide(found)
        elif not isinstance(found, Foreign):
            self._recipes = [found] * len(groups)
            for group in groups:
                require_options(group.options, found.defaults)
        pairs = zip(self._recipes, self.groups, strict=False)  # a class of the user's has no recipe
        self.check([{**own.defaults, **group.options} for own, group in pairs], "the constructor")

    def options_in(self, saved: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a group in a state dict, with the flags that it lacks.

        Args:
            saved: the group in the state dict.
            own: the group of the optimizer.
        """
        found = {key: value for key, value in saved.items() if key not in self._beside}
        return {**neutral_flags(saved, own), **found}

    def check(self, groups: Sequence[Mapping[str, Any]], what: str = "step") -> None:
        """See that every worker can step by these options, before any of them does.

        Numbers that belong to no parameter each makes by the hyper-parameters that it has, and they
        are to be the same on all.

        Args:
            groups: with their options as they are now.
            what: is to be done, for errors.

        Raises:
            WorkerError: options that make no chain, for the workers that would step by them.
            ValueError: groups that differ in what such numbers are made by.
        """
        errors: dict[str, BaseException] = {}
        chains = []
        for number in range(len(self._recipes)):
            try:
                chains.append(self._chain(number, groups[number]))
            except (TypeError, ValueError) as error:
                own = {one.worker: error for one in self.groups[number].params}
                errors = {**own, **errors}
        if errors:
            raise failed(what, errors, len({one.worker for one in self.given}))
        for place in self._shared:
            hypers = [
                chain.hypers[part.places.index(place)]
                for part, chain in zip(self._parts, chains, strict=True)
                if part.places
            ]
            if hypers:
                common_hyper(self._stages[place], hypers)

    def _chain(self, number: int, options: Mapping[str, Any]) -> GroupChain:
        """The chain of a group.

        Raises:
            TypeError, ValueError: options that make none, or another one than those of before.
        """
        chain = self._chains.of(number, options, "cpu")
        if chain.stages != self._first.setdefault(number, chain.stages):
            raise ValueError(
                f"the options of parameter group {number} need another chain than it was made "
                "with; make another optimizer for them"
            )
        return chain

    def _divide(self, recipe: ComposedRecipe) -> None:
        self.found = recipe.listed({one.name: one.like for one in self.given})
        optimizer, self._stages = recipe.optimizer, recipe.optimizer.stages
        require_gradients_alone(optimizer, "DistributedOptimizer")
        self._beside = ("step", *GroupChains(optimizer).numbers())
        unmet = UnmatchedSelectors(optimizer.links, optimizer.overrides)
        unmet.are_numbered = not all(group.named for group in self.groups)
        groups, first = self.groups, 0
        self.groups = []
        for group in groups:
            placed = {one.name: one for one in group.params}
            pairs = [(one.name, one.like) for one in group.params]
            for one, own in recipe.parts({**group.options, "params": pairs}, first, unmet):
                part = one._replace(group=guarded(one.group, own.defaults))
                params = [placed[name] for name, _ in part.group["params"]]
                self.groups.append(PlacedGroup(params, options_of(part.group), group.named))
                self._parts.append(part)
                self._recipes.append(own)
            first += len(pairs)
        unmet.check()
        self._shared = [
            place for place, stage in enumerate(self._stages) if stage.combine is not None
        ]
        for part in self._parts:
            lacking = [place for place in self._shared if place not in part.places]
            if part.places and lacking:
                raise TypeError(
                    f"{self._name(lacking[0])} keeps numbers for all parameters, and does not act "
                    f"on {part.group['params'][0][0]!r}: over workers, it must act on every "
                    "parameter that is not frozen; put it around the partition"
                )

    def _name(self, place: int) -> str:
        return self._stages[place].name
