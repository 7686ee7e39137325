"""Parameters of ZeroRedundancyOptimizer: checks, names and specs."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim.engine.stages import Kind
from functional_optim.engine.tensors import check_no_dtensor, check_param, check_writable
from sharding.spec import ParameterSpec

Groups = Sequence[Mapping[str, Any]]
"""Parameter groups, as torch.optim keeps them."""


def parse_params(params: Any) -> list[Any]:
    """Check parameters, (name, parameter) pairs or groups, and return them as a list.

    Raises:
        TypeError: a single tensor, no iterable, or a mixed list.
        ValueError: no parameters, a group without "params", a sparse parameter, or two parameters
            of a group that share memory.
    """
    what = "params must be an iterable of tensors, of (name, tensor) pairs, or of dicts"
    if isinstance(params, Tensor) or not isinstance(params, Iterable):
        raise TypeError(f"{what}, got {torch.typename(params)}")
    given = list(params)
    if not given:
        raise ValueError("ZeroRedundancyOptimizer got an empty list of parameters; give at least 1")
    if all(isinstance(one, dict) for one in given):
        groups = [parse_group(one, number) for number, one in enumerate(given)]
        if not any(group["params"] for group in groups):
            raise ValueError(f"ZeroRedundancyOptimizer got {len(groups)} groups, all of them empty")
        return groups
    if not (all(map(_is_named, given)) or all(isinstance(one, Tensor) for one in given)):
        kinds = ", ".join(sorted({type(one).__name__ for one in given}))
        raise TypeError(f"{what}, and all of one kind, got {kinds}")
    _check_tensors(given, 0)
    return given


def parse_group(group: dict[str, Any], number: int) -> dict[str, Any]:
    """Check a group, and return a copy whose parameters are a list.

    Raises:
        ValueError: the group has no "params", a parameter is sparse, or parameters share memory.
    """
    if "params" not in group:
        raise ValueError(
            "each parameter group must have its parameters under 'params', got one with "
            f"{', '.join(map(repr, group)) or 'nothing'}"
        )
    given = group["params"]
    if isinstance(given, set):
        return dict(group)  # torch raises the error
    made = [given] if isinstance(given, Tensor) else list(given)
    _check_tensors(made, number)
    return {**group, "params": made}


def _is_named(one: Any) -> bool:
    return isinstance(one, tuple) and len(one) == 2 and isinstance(one[1], Tensor)


def _check_tensors(given: Sequence[Any], number: int) -> None:
    named: dict[str, Tensor] = {}
    seen: set[int] = set()
    for place, one in enumerate(given):
        name, param = one if _is_named(one) else (f"param_groups[{number}][{place}]", one)
        if not isinstance(param, Tensor):
            continue  # torch raises the error
        # Parameters that are never trained may have any dtype, as in torch.optim.
        if param.requires_grad or param.layout != torch.strided:
            check_param(param, str(name))
        if id(param) not in seen:
            seen.add(id(param))
            named[str(name)] = param
    check_no_dtensor(named, "ZeroRedundancyOptimizer, which shards state by itself,")
    check_writable(named)


def named_params(groups: Groups) -> dict[str, Tensor]:
    """Return every parameter once, by name, or by "3.0": its group, and its index in the group."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for number, group in enumerate(groups):
        names = group.get("param_names")
        for place, param in enumerate(group["params"]):
            if id(param) in seen:
                continue
            seen.add(id(param))
            path = names[place] if names else f"{number}.{place}"
            if path in found:
                raise ValueError(f"two parameters have the name {path!r}; give each one of its own")
            found[path] = param
    return found


def indices_of(groups: Groups) -> dict[int, int]:
    """Return the number of each parameter in torch.optim's ``state_dict``, by its id."""
    found: dict[int, int] = {}
    for number, param in enumerate(param for group in groups for param in group["params"]):
        found.setdefault(id(param), number)
    return found


def group_numbers(groups: Groups) -> dict[int, int]:
    """Return the number of each parameter's group, by its id."""
    return {id(param): number for number, group in enumerate(groups) for param in group["params"]}


def specs_of_groups(
    params: Mapping[str, Tensor], groups: Groups, kinds: Sequence[Kind]
) -> tuple[ParameterSpec, ...]:
    """Return the specs of parameters. ``kinds`` says for each group if parameters may be cut.

    A parameter that is not contiguous is never cut, because a range of its elements would depend
    on its strides.
    """
    number = group_numbers(groups)
    devices = _device_names(list(params.values()))
    return tuple(
        ParameterSpec(
            path,
            tuple(param.shape),
            param.dtype,
            devices[param.device],
            param.requires_grad,
            kinds[number[id(param)]] if param.is_contiguous() else "per_matrix",
            number[id(param)],
        )
        for path, param in params.items()
    )


def _device_names(params: Sequence[Tensor]) -> dict[torch.device, str]:
    """Return names of devices that are equal on all ranks, whichever GPUs each rank has."""
    found: dict[torch.device, str] = {}
    for param in params:
        if param.device not in found:
            same = sum(device.type == param.device.type for device in found)
            kind = param.device.type
            found[param.device] = f"{kind} {same}" if same else kind
    return found
