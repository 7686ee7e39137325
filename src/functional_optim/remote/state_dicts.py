"""State dicts of workers: merged into one in torch's format, and split again."""

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from functional_optim.engine.options import are_unchanged, options_of
from functional_optim.engine.states import match_params
from functional_optim.remote.placement import PlacedGroup
from functional_optim.remote.worker import WorkerGroup


def merge_state_dicts(
    parts: Mapping[str, Mapping[str, Any]],
    worker_groups: Mapping[str, Sequence[WorkerGroup]],
    groups: Sequence[PlacedGroup],
    param_groups: Sequence[Mapping[str, Any]],
    *,
    opaque: bool,
) -> dict[str, Any]:
    """Merge the state dicts of workers into one in torch's format, with the names of parameters.

    ``opaque`` is True if steps are made by a class of the user, which may change its groups.
    """
    numbers, made = _numbers(groups), list(map(options_of, param_groups))
    state: dict[int, Any] = {}

    def is_changed(number: int, key: str, value: Any) -> bool:
        return not are_unchanged((param_groups[number].get(key),), (value,))

    for worker, part in parts.items():
        for group, saved in zip(worker_groups[worker], part["param_groups"], strict=True):
            options = made[group.number]
            for key, value in options_of(saved).items():
                # Some classes count steps per group. torch has one count: take the largest.
                if key == "step":
                    options[key] = max(options.get(key, 0), value)
                elif key not in options or (opaque and is_changed(group.number, key, value)):
                    options[key] = value
            for (name, _), local in zip(group.params, saved["params"], strict=True):
                if local in part["state"]:
                    state[numbers[name]] = part["state"][local]
    return {
        "state": dict(sorted(state.items())),
        "param_groups": [
            {**options, **_param_entries(group, numbers)}
            for options, group in zip(made, groups, strict=True)
        ],
        "workers": {
            worker: [name for group in worker_groups[worker] for name, _ in group.params]
            for worker in parts
        },
    }


def split_state_dict(
    state_dict: Mapping[str, Any],
    worker_groups: Mapping[str, Sequence[WorkerGroup]],
    groups: Sequence[PlacedGroup],
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Return the state dict for each worker, and the options of each group.

    Parameters are matched by name if the state dict and the groups have names, otherwise by their
    index, as in torch.
    """
    numbers = _numbers(groups)
    own = [_param_entries(group, numbers) for group in groups]
    saved, state = match_params(state_dict, own), state_dict["state"]
    if len(saved) != len(groups):
        raise ValueError(
            f"this state has {len(saved)} parameter groups, the optimizer has {len(groups)}"
        )
    keys: dict[str, Any] = {}
    for number, (one, group) in enumerate(zip(saved, groups, strict=True)):
        if len(one["params"]) != len(group.params):
            raise ValueError(
                f"parameter group {number} of this state has {len(one['params'])} parameters, the "
                f"optimizer's has {len(group.params)}; create the optimizer with the groups of the "
                "state dict"
            )
        keys.update(zip((param.name for param in group.params), one["params"], strict=True))
    parts = {}
    for worker, of_worker in worker_groups.items():
        part: dict[str, Any] = {"state": {}, "param_groups": []}
        local = count()
        for own_group in of_worker:
            found = {next(local): keys[name] for name, _ in own_group.params}
            part["state"].update({k: state[key] for k, key in found.items() if key in state})
            options = options_of(saved[own_group.number])
            part["param_groups"].append({**options, "params": [*found]})
        parts[worker] = part
    return parts, [options_of(one) for one in saved]


def _numbers(groups: Sequence[PlacedGroup]) -> dict[str, int]:
    """Return the number of each parameter in torch's format, by name."""
    names = (one.name for group in groups for one in group.params)
    return {name: number for number, name in enumerate(names)}


def _param_entries(group: PlacedGroup, numbers: Mapping[str, int]) -> dict[str, Any]:
    entries: dict[str, Any] = {"params": [numbers[one.name] for one in group.params]}
    if group.named:
        entries["param_names"] = [one.name for one in group.params]
    return entries
