"""Inputs of parameters, as users of torch.optim give them: mappings by parameter, or by name."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from functional_optim.core.brief import brief, some
from functional_optim.core.links import Links
from functional_optim.frontends.group_tensors import Group
from functional_optim.plan.leaf_inputs import input_names


def of_parameters(
    links: Links, groups: Sequence[Group], extra: Mapping[str, Any], params: Sequence[Tensor]
) -> Mapping[str, Any]:
    """Inputs of which those of parameters are lists: one entry for each of ``params``.

    Args:
        links: of the optimizer.
        groups: all of its parameter groups, those that are frozen among them.
        extra: as the caller gave it.
        params: of the step.

    Raises:
        TypeError: no mapping by parameter or by name.
        ValueError: one that has something for what is no parameter of the optimizer.
    """
    wanted = sorted(input_names(links).intersection(extra)) if extra else []
    if not wanted:
        return extra
    made, names = dict(extra), _names(groups)
    known = {id(param) for group in groups for param in group.params}
    for name in wanted:
        given = _by_id(name, extra[name], names)
        unknown = [key for key in given if key not in known]
        if unknown:
            raise ValueError(
                f"extra[{name!r}] has {brief(given[unknown[0]])} for a tensor that is no parameter "
                "of this optimizer: leave it out, or add it by add_param_group"
            )
        made[name] = [given.get(id(param)) for param in params]
    return made


def _names(groups: Sequence[Group]) -> dict[str, int]:
    """The identity of each parameter that has a name, by that."""
    return {
        name: id(param)
        for group in groups
        for name, param in zip(group.names or (), group.params, strict=bool(group.names))
    }


def _by_id(name: str, given: Any, names: Mapping[str, int]) -> dict[int, Any]:
    """Return the given values by the identity of their parameter."""
    if not isinstance(given, Mapping):
        raise TypeError(
            f"extra[{name!r}] must be a mapping by parameter, such as dict(zip(parameters, "
            f"tensors)), or by name where the optimizer was given names; got {brief(given)}"
        )
    found: dict[int, Any] = {}
    for key, value in given.items():
        place = id(key) if isinstance(key, Tensor) else names.get(key)
        if place is None or place in found:
            known = some(list(names))
            what = "is given twice" if place is not None else "is no parameter of this optimizer"
            raise ValueError(
                f"extra[{name!r}]: {brief(key)} {what}; give parameters themselves as keys, each "
                f"once, or their names: {known or 'it was given none (see named_parameters)'}"
            )
        found[place] = value
    return found
