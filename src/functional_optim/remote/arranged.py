"""Parameter groups as workers have them: divided, where leaves differ in their chains."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from functional_optim.composed_local import refuse_extra
from functional_optim.local_optimizer import Foreign, options_of
from functional_optim.recipe import Chains, ComposedRecipe, Recipe
from functional_optim.remote.placing import PlacedGroup
from functional_optim.torch_composed import ComposedGroups, Part
from functional_optim.torch_schedule import guard_schedules


class Arranged:
    """Groups of one chain each, and what all workers must agree on.

    Args:
        groups: of the caller.
        found: what makes the optimizer of each worker.

    Raises:
        TypeError: parameters of which the shape is not known here, where groups are divided; a
            stage that needs inputs beside the gradients, or keeps numbers for some parameters only.
        ValueError: groups that differ in what such numbers are made by.
    """

    def __init__(self, groups: Sequence[PlacedGroup], found: Recipe | Foreign) -> None:
        self.given = [one for group in groups for one in group.params]
        """The parameters in the order of the caller."""
        self.groups = list(groups)
        self._beside: tuple[str, ...] = ("step",)
        self._shared: list[int] = []
        self._parts: list[tuple[Part, Recipe]] = []
        self._chains = Chains(lambda number: self._parts[number][1])
        if isinstance(found, ComposedRecipe):
            self._divide(found)

    def options_in(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a group in a state dict, without what else is kept there."""
        return {key: value for key, value in saved.items() if key not in self._beside}

    def check(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """See that all workers make the same numbers that belong to no parameter.

        Each makes them by the hyper-parameters that it has.

        Raises:
            ValueError: groups that differ in these.
        """
        for place in self._shared:
            hypers = []
            for number, (part, _) in enumerate(self._parts):
                if part.places:
                    chain = self._chains.of(number, groups[number], "cpu")
                    hypers.append(chain.hypers[part.places.index(place)])
            if any(one != hypers[0] for one in hypers):
                other = next(one for one in hypers if one != hypers[0])
                raise ValueError(
                    f"{self._name(place)} keeps numbers for the parameters of all workers, so its "
                    "hyper-parameters must be the same in all parameter groups; got "
                    f"{hypers[0]} and {other}"
                )

    def _divide(self, recipe: ComposedRecipe) -> None:
        optimizer, self._stages = recipe.optimizer, recipe.optimizer.stages
        refuse_extra(optimizer)
        for one in self.given:
            if not isinstance(one.handle, Tensor):
                raise TypeError(
                    f"{one.name!r} is on another process, and which stages of this optimizer act "
                    "on a parameter is decided here: use DistributedOptimizer.over_threads or "
                    "over_ray, or an optimizer of one chain"
                )
        self._beside = ("step", *ComposedGroups(optimizer).numbers())
        groups, first = self.groups, 0
        self.groups = []
        for group in groups:
            placed = {one.name: one for one in group.params}
            pairs = [(one.name, one.handle) for one in group.params]
            for part, own in recipe.parts({**group.options, "params": pairs}, first):
                guard_schedules(part.group, own.defaults)
                params = [placed[name] for name, _ in part.group["params"]]
                self.groups.append(PlacedGroup(params, options_of(part.group), group.named))
                self._parts.append((part, own))
            first += len(pairs)
        self._shared = [
            place for place, stage in enumerate(self._stages) if stage.combine is not None
        ]
        for part, _ in self._parts:
            lacking = [place for place in self._shared if place not in part.places]
            if part.places and lacking:
                raise TypeError(
                    f"{self._name(lacking[0])} keeps numbers for all parameters, and does not act "
                    f"on {part.group['params'][0][0]!r}: over workers, it must act on every "
                    "parameter that is not frozen; put it around the partition"
                )
        self.check([group.options for group in self.groups])

    def _name(self, place: int) -> str:
        return self._stages[place].name
