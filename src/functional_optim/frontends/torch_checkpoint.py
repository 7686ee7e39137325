"""Entries and groups of state dicts in the form of torch.optim."""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.format import format_names, format_value
from functional_optim.core.stage import Stage
from functional_optim.core.torch_state import has_begun, starts_in_first_step
from functional_optim.frontends.torch_schedule import GroupSchedule
from functional_optim.storage.conversion import plain_stages

DECOUPLED = "decoupled_weight_decay"
"""The name of the stage, and of torch's option, for decoupled weight decay."""


COUNTED_IN_PYTHON = frozenset({"sparse_adam"})
"""Rules whose torch class stores its step count as an int. With a tensor instead, torch would
compute coefficients in float32."""


def require_dict(given: Any) -> None:
    """Raise TypeError unless a value is a dict, which hooks may change into a state dict."""
    if not isinstance(given, Mapping):
        is_path = isinstance(given, (str, PathLike))
        way = "; load the file first, as in load_state_dict(torch.load(path))" if is_path else ""
        raise TypeError(f"a state dict must be a dict, got {format_value(given)}{way}")


def require_state_dict(given: Any) -> None:
    """Raise TypeError or ValueError unless a value has the keys of an optimizer's state dict."""
    require_dict(given)
    if not {"state", "param_groups"} <= given.keys():
        raise ValueError(
            "the state dict of an optimizer has 'state' and 'param_groups', and this one has "
            f"{format_names(list(map(str, given))) or 'nothing'}; of a checkpoint with several "
            "parts, pass the part of the optimizer, such as checkpoint['optimizer']"
        )


def torch_step(step: Tensor) -> Tensor:
    """Return a step count as torch.optim stores it: a 0-d float tensor on the CPU.

    Counts above 2**24 are float64, since float32 would round them.
    """
    wide = torch.get_default_dtype() == torch.float64 or int(step) > 2**24
    return step.to(device="cpu", dtype=torch.float64 if wide else torch.float32)


def checkpoint_entries(
    stages: Sequence[Stage],
    hypers: Sequence[Any],
    param: Tensor,
    entries: Mapping[str, Any],
    *,
    damped: bool,
) -> dict[str, Any]:
    """Return the entries of a parameter in a checkpoint, with torch's dtype of the step count.

    Some torch classes create an entry in the first step, and treat an existing entry as that of a
    later step. So before the first step, such entries are left out. ``damped`` is True if torch
    multiplies all gradients but the first one by ``1 - dampening``.
    """
    # Without dampening, a buffer of zeros gives the same first step as a missing buffer.
    if damped and not has_begun(entries) and starts_in_first_step(stages, hypers, param):
        entries = {"step": entries["step"]}
    step = entries["step"]
    in_python = stages[-1].name in COUNTED_IN_PYTHON
    return {**entries, "step": int(step) if in_python else torch_step(step)}


def with_group_steps(
    states: Mapping[Any, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the groups of a state dict, with the current step count in groups that have a count.

    If a group has "step", its class has one count per group: the largest count of its parameters.
    """
    made = []
    for group in groups:
        steps = [states.get(number, {}).get("step", 0) for number in group["params"]]
        counted = {"step": max(map(int, steps), default=0)} if "step" in group else {}
        made.append({**group, **counted})
    return made


def decouples(stages: Sequence[Stage]) -> bool:
    """Return True if weight decay is decoupled. A stored chain counts as the plain chain."""
    return any(stage.name == DECOUPLED for stage in plain_stages(stages))


def has_other_decay(stages: Sequence[Stage], group: Mapping[str, Any]) -> bool:
    """Return True if torch's option in a group asks for another weight decay than the chain has.

    Any option named ``weight_decay`` counts, also with the name of its part
    (``"adam.weight_decay"``). While all are 0, the answer is False. Frozen parameters have no
    stages.
    """
    here = decouples(stages)
    if not stages or bool(group.get(DECOUPLED, here)) == here:
        return False
    return any(bool(value != 0.0) for key, value in group.items() if _is_weight_decay(key))


def require_same_decay(stages: Sequence[Stage], group: Mapping[str, Any]) -> None:
    """Raise ValueError if a group has torch's option for another weight decay than the chain.

    torch's classes read this option in each group. Here, the stages of the chain decide it.
    """
    if has_other_decay(stages, group):
        here = decouples(stages)
        raise ValueError(
            f"a parameter group has {DECOUPLED}={group[DECOUPLED]!r}, but the chain decides the "
            f"kind of weight decay, and this chain has {'the' if here else 'no'} stage "
            f"{DECOUPLED!r}: {', '.join(stage.name for stage in stages)}. Remove the option from "
            f"the group and pass {DECOUPLED}={not here} to the algorithm; if groups differ, give "
            "each kind of weight decay its own part of a partition"
        )


def without_decay_kind(stages: Sequence[Stage], loaded: Mapping[str, Any]) -> dict[str, Any]:
    """Return a loaded group without torch's option for the kind of weight decay, after a check."""
    if has_other_decay(stages, loaded):
        decoupled = not decouples(stages)
        raise ValueError(
            f"this checkpoint has {'decoupled' if decoupled else 'coupled'} weight decay, and the "
            f"chain has not: {', '.join(stage.name for stage in stages)}. Load it into an "
            "optimizer with the same kind of weight decay, such as "
            f"{'adamw' if decoupled else 'adam or sgd'} with weight_decay=...; or remove "
            f"{DECOUPLED!r} from the checkpoint's groups, and the chain decides the kind"
        )
    return {key: value for key, value in loaded.items() if key != DECOUPLED}


def _is_weight_decay(key: Any) -> bool:
    return str(key).rpartition(".")[2] == "weight_decay"


def decay_options(stages: Sequence[Stage]) -> dict[str, Any]:
    """Return the entry for groups of a checkpoint if weight decay is decoupled, else nothing."""
    return {DECOUPLED: True} if decouples(stages) else {}


def own_copy(value: Any, device: str | None = None) -> Any:
    """Copy dicts and lists, and their tensors; ``device`` is where the copies are, if given."""
    if isinstance(value, Tensor):
        copy = value.detach().clone()
        return copy if device is None else copy.to(device)
    if isinstance(value, dict) and not isinstance(value, GroupSchedule):
        return {key: own_copy(item, device) for key, item in value.items()}
    if isinstance(value, list):
        return [own_copy(item, device) for item in value]
    return value
