"""Recipe of a ZeroRedundancyOptimizer, and division of its groups into groups of one chain."""

from collections.abc import Mapping, Sequence
from typing import Any

from functional_optim.engine.groups import GroupChains, GroupPart
from functional_optim.engine.messages import format_value
from functional_optim.engine.options import require_options
from functional_optim.engine.recipes import Recipe, class_of_functional, recipe_of
from functional_optim.engine.stages import Stage, is_measured, require_gradients_alone


def divide_group(chains: GroupChains, group: dict[str, Any], first: int) -> list[dict[str, Any]]:
    """Divide a group into groups with one chain each, and add their chains.

    Args:
        chains: of the groups before.
        group: its "params" are parameters, or pairs of a name and a parameter.
        first: number of parameters in the groups before.

    Raises:
        TypeError: an option that the optimizer does not have; without shared scalars, parameters
            that differ in the stages that need a total over all gradients.
        ValueError: a parameter on which no rule acts.
    """
    if not chains.divides:
        require_options(group, chains.recipe.defaults)
        chains.add(group["params"])
        return [group]
    if not isinstance(group["params"], list):
        return [group]  # torch raises the error
    parts = chains.divide(group, first)
    for part in () if chains.has_shared else parts:
        _check_totals(chains.optimizer.stages, part)
    for part in parts:
        chains.add(part.group["params"], part)
    return [part.group for part in parts]


def _check_totals(stages: Sequence[Stage], part: GroupPart) -> None:
    """Raise TypeError if a group lacks a stage that needs a total over all gradients."""
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
