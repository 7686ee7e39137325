"""Inputs per parameter of a TorchOptimizer: mappings by parameter or by name."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from functional_optim.core.format import format_names, format_value
from functional_optim.core.links import Links
from functional_optim.frontends.group_tensors import Group
from functional_optim.plan.leaf_inputs import input_names


def list_inputs(
    links: Links, groups: Sequence[Group], extra: Mapping[str, Any], params: Sequence[Tensor]
) -> Mapping[str, Any]:
    """Return the inputs of a step, with inputs per parameter as lists in the order of ``params``.

    ``groups`` are all parameter groups, also frozen ones.
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
                f"extra[{name!r}] has {format_value(given[unknown[0]])} for a tensor that is no "
                "parameter of this optimizer: leave it out, or add it by add_param_group"
            )
        made[name] = [given.get(id(param)) for param in params]
    return made


def _names(groups: Sequence[Group]) -> dict[str, int]:
    """Return ``id`` of each parameter that has a name, by name."""
    return {
        name: id(param)
        for group in groups
        for name, param in zip(group.names or (), group.params, strict=bool(group.names))
    }


def _by_id(name: str, given: Any, names: Mapping[str, int]) -> dict[int, Any]:
    """Return the values of an input by ``id`` of their parameter."""
    if not isinstance(given, Mapping):
        raise TypeError(
            f"extra[{name!r}] must be a mapping by parameter, such as dict(zip(parameters, "
            f"tensors)), or by name where the optimizer was given names; got {format_value(given)}"
        )
    found: dict[int, Any] = {}
    for key, value in given.items():
        place = id(key) if isinstance(key, Tensor) else names.get(key)
        if place is None or place in found:
            known = format_names(list(names))
            what = "is given twice" if place is not None else "is no parameter of this optimizer"
            raise ValueError(
                f"extra[{name!r}]: {format_value(key)} {what}; give parameters themselves as "
                "keys, each once, or their names: "
                f"{known or 'it was given none (see named_parameters)'}"
            )
        found[place] = value
    return found
