"""Recipes of parameter groups: one for all groups, or one for the chain of each group."""

from collections.abc import Mapping
from typing import Any

from functional_optim.core.chain import require_gradients_alone
from functional_optim.core.format import format_value
from functional_optim.core.links import has_shared_state
from functional_optim.core.unmatched_selectors import UnmatchedSelectors
from functional_optim.frontends.group_chains import GroupChains
from functional_optim.frontends.group_parts import GroupPart
from functional_optim.frontends.recipe import ComposedRecipe, Recipe, class_of_functional, recipe_of
from functional_optim.frontends.torch_groups import require_options
from functional_optim.kernels import is_measured
from functional_optim.optimizer import Optimizer


class GroupRecipes:
    """Recipes of parameter groups. A recipe builds the optimizer of a group from its options.

    ``whole`` is the recipe of the optimizer that the caller passed.
    """

    def __init__(self, whole: Recipe) -> None:
        self.whole = whole
        """The recipe with all stages, and with the options that every group has."""
        self._own: list[Recipe] = []
        self.chains: GroupChains | None = None
        """If the optimizer has shared scalars, these scalars and the chain of each group."""
        if self.divides and _has_shared_scalars(whole.optimizer):
            self.chains = GroupChains(whole.build({}, "cpu"))
        self.unmet = UnmatchedSelectors(
            whole.optimizer.links, whole.optimizer.overrides if self.divides else ()
        )

    @property
    def divides(self) -> bool:
        """Return True if groups are divided by chain. Totals are then summed by group first."""
        return isinstance(self.whole, ComposedRecipe)

    def of(self, number: int) -> Recipe:
        """Return the recipe of a group."""
        return self._own[number]

    def divide(self, group: dict[str, Any], first: int) -> list[dict[str, Any]]:
        """Divide a group into groups with one chain each, and store their recipes.

        Args:
            group: its "params" are parameters, or pairs of a name and a parameter.
            first: number of parameters in the groups before.

        Raises:
            TypeError: an option that the optimizer does not have; without shared scalars,
                parameters that differ in the stages that need a total over all gradients.
            ValueError: a parameter on which no rule acts.
        """
        if not isinstance(self.whole, ComposedRecipe) or not isinstance(group["params"], list):
            require_options(group, self.whole.defaults)
            self._own.append(self.whole)
            return [group]
        parts = self.whole.parts(group, first, self.unmet)
        for part, _ in parts:
            if self.chains is None:
                self._check_totals(part)
            else:
                self.chains.parts.append((part.optimizer, part.places))
        self._own += [own for _, own in parts]
        return [part.group for part, _ in parts]

    def truncate(self, count: int) -> None:
        """Remove the recipes of all groups after the first ``count``."""
        del self._own[count:]
        if self.chains is not None:
            del self.chains.parts[count:]

    def _check_totals(self, part: GroupPart) -> None:
        """Raise TypeError if a group lacks a stage that needs a total over all gradients."""
        stages = self.whole.optimizer.stages
        wanted = [place for place, stage in enumerate(stages) if is_measured(stage)]
        lacking = [stages[place].name for place in wanted if place not in part.places]
        if lacking and part.places:
            name = _name_of(part.group)
            raise TypeError(
                f"{lacking[0]} needs a total over all gradients, and does not act on {name}: a "
                "sharded optimizer takes such stages where they act on every parameter that is not "
                "frozen; put it around the partition, as in chain(clip_by_global_norm(1.0), "
                "partition(...))"
            )


def _has_shared_scalars(optimizer: Optimizer) -> bool:
    return has_shared_state(optimizer.links, optimizer.overrides)


def _name_of(group: Mapping[str, Any]) -> str:
    """Return a name of a group's first parameter, for errors."""
    first = group["params"][0]
    return repr(first[0]) if isinstance(first, tuple) else f"one of shape {tuple(first.shape)}"


def build_zero_recipe(
    optimizer_class: Any, defaults: Mapping[str, Any], executor: str | None, *, overlap: bool
) -> Recipe | None:
    """Return the recipe of ``optimizer_class``; None for a class without functional equivalent.

    Raises:
        TypeError: no optimizer, or an argument that the optimizer does not have.
        ValueError: a value out of bounds, an unknown executor; one of torch's functional classes
            without overlap; with overlap, a class without functional equivalent.
    """
    functional = class_of_functional(optimizer_class)
    if functional is not None:
        if not overlap:
            raise ValueError(
                f"{optimizer_class.__name__} is a functional optimizer, which torch takes with "
                f"overlap_with_ddp=True only; pass torch.optim.{functional.__name__}"
            )
        optimizer_class = functional
    found = recipe_of(optimizer_class, defaults, executor)
    if found is not None:
        require_gradients_alone(found.optimizer, "a sharded optimizer")
    if overlap and found is None:
        raise ValueError(
            f"{format_value(optimizer_class)} has no functional equivalent, so it cannot step "
            "parts of the parameters while backward goes on: register one with "
            "register_functional_optim, or leave overlap_with_ddp=False"
        )
    return found
