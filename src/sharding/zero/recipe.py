"""Values that ZeRO takes as ``optimizer_class``, with overlap and without."""

from collections.abc import Mapping
from typing import Any

from functional_optim.core.brief import brief
from functional_optim.core.chain import require_gradients_alone
from functional_optim.frontends import recipe
from functional_optim.frontends.recipe import Recipe, class_of_functional


def recipe_of(
    optimizer_class: Any, defaults: Mapping[str, Any], executor: str | None, *, overlap: bool
) -> Recipe | None:
    """The recipe of what a caller gave as ``optimizer_class``; None where only it can step.

    Raises:
        TypeError: something else than an optimizer, or an argument that it does not have.
        ValueError: a value out of bounds, an unknown executor; one of torch's functional classes
            without overlap, or, with it, a class that has no functional equivalent.
    """
    functional = class_of_functional(optimizer_class)
    if functional is not None:
        if not overlap:
            raise ValueError(
                f"{optimizer_class.__name__} is a functional optimizer, which torch takes with "
                f"overlap_with_ddp=True only; pass torch.optim.{functional.__name__}"
            )
        optimizer_class = functional
    found = recipe.recipe_of(optimizer_class, defaults, executor)
    if found is not None:
        require_gradients_alone(found.optimizer, "a sharded optimizer")
    if overlap and found is None:
        raise ValueError(
            f"{brief(optimizer_class)} has no functional equivalent, so it cannot step parts of "
            "the parameters while backward goes on: register one with "
            "register_functional_optim, or leave overlap_with_ddp=False"
        )
    return found
