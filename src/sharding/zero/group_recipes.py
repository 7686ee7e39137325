"""Recipes of parameter groups: one for all of them, or one for the chain of each."""

from collections.abc import Mapping
from typing import Any

from functional_optim.core.global_step import has_global_schedule
from functional_optim.core.links import keeps_shared
from functional_optim.core.unmatched_selectors import UnmatchedSelectors
from functional_optim.frontends.group_parts import GroupPart
from functional_optim.frontends.recipe import ComposedRecipe, Recipe
from functional_optim.frontends.torch_groups import require_options
from functional_optim.kernels import is_measured
from functional_optim.optimizer import Optimizer


class GroupRecipes:
    """The recipes of a ZeroRedundancyOptimizer's parameter groups.

    Args:
        whole: the recipe of what the caller gave.
    """

    def __init__(self, whole: Recipe) -> None:
        self.whole = whole
        """Of all stages, and the options that every group has."""
        self._own: list[Recipe] = []
        self._sizes: list[int] = []
        self.parts: list[tuple[Optimizer, tuple[int, ...]]] = []
        """Where groups are divided, the optimizer of each, and the places of its links."""
        self.unmet = UnmatchedSelectors(
            whole.optimizer.links, whole.optimizer.overrides if self.divides else ()
        )

    @property
    def divides(self) -> bool:
        """Return True if groups are divided by chain: totals are then summed by group first."""
        return isinstance(self.whole, ComposedRecipe)

    @property
    def keeps_numbers(self) -> bool:
        """Return True if anything is kept that belongs to no parameter."""
        return self.divides and keeps_numbers(self.whole.optimizer)

    def of(self, number: int) -> Recipe:
        """The recipe of a group."""
        return self._own[number]

    def divided(self, group: dict[str, Any]) -> list[dict[str, Any]]:
        """A group as groups that have one chain each; their recipes are known from now on.

        Raises:
            TypeError: an option that the optimizer does not have; parameters that differ in the
                stages that need a total over all gradients, if no numbers are kept for all of them.
            ValueError: a parameter on which no rule acts.
        """
        params = group.get("params")
        if not isinstance(self.whole, ComposedRecipe) or not isinstance(params, list):
            require_options(group, self.whole.defaults)
            self._own.append(self.whole)
            self._sizes.append(len(params) if isinstance(params, list) else 1)
            return [group]
        parts = self.whole.parts(group, sum(self._sizes), self.unmet)
        for part, _ in () if self.keeps_numbers else parts:
            self._check_totals(part)
        self.parts += [(part.optimizer, part.places) for part, _ in parts]
        self._own += [own for _, own in parts]
        self._sizes += [len(part.group["params"]) for part, _ in parts]
        return [part.group for part, _ in parts]

    def keep(self, count: int) -> None:
        """Forget all recipes but those of the first groups."""
        del self._own[count:], self._sizes[count:], self.parts[count:]

    def _check_totals(self, part: GroupPart) -> None:
        """Every rank, whatever it owns, takes the same totals at the same places.

        Raises:
            TypeError: it would not.
        """
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


def keeps_numbers(optimizer: Optimizer) -> bool:
    """Return True if an optimizer keeps numbers that belong to no parameter."""
    changed = [(value,) for _, changes in optimizer.overrides for *_, value in changes]
    return keeps_shared(optimizer.links) or has_global_schedule(changed)


def _name_of(group: Mapping[str, Any]) -> str:
    """Return the name of a group's first parameter, for errors."""
    first = group["params"][0]
    return repr(first[0]) if isinstance(first, tuple) else f"one of shape {tuple(first.shape)}"
