"""State dicts of workers: merged into one in torch's format, and split again."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from functional_optim.frontends.checkpoint_names import match_by_name
from functional_optim.frontends.torch_groups import options_of
from functional_optim.remote.placement import PlacedGroup
from functional_optim.remote.worker import WorkerGroup


def merge_state_dicts(
    parts: Mapping[str, Mapping[str, Any]],
    worker_groups: Mapping[str, Sequence[WorkerGroup]],
    groups: Sequence[PlacedGroup],
    param_groups: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Merge the state dicts of workers into one in torch's format, with the names of parameters."""
    starts = _initial_values(groups)
    made = list(map(options_of, param_groups))
    state: dict[int, Any] = {}
    for worker, part in parts.items():
        for group, saved in zip(worker_groups[worker], part["param_groups"], strict=True):
            options = made[group.number]
            for key, value in options_of(saved).items():
                # Some classes count steps per group. torch has one count: take the largest.
                known = options.get(key, 0 if key == "step" else value)
                options[key] = max(known, value) if key == "step" else known
            for index, local in zip(group.indices, saved["params"], strict=True):
                if local in part["state"]:
                    state[starts[group.number] + index] = part["state"][local]
    return {
        "state": dict(sorted(state.items())),
        "param_groups": [
            {**options, **_param_entries(group, start)}
            for options, group, start in zip(made, groups, starts, strict=True)
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

    Raises:
        KeyError: the state dict is not in torch's format.
        ValueError: other groups, or other parameters in them.
    """
    starts = _initial_values(groups)
    own = [_param_entries(group, start) for group, start in zip(groups, starts, strict=True)]
    saved, state = match_by_name(state_dict["param_groups"], own), state_dict["state"]
    if len(saved) != len(groups):
        raise ValueError(
            f"this state has {len(saved)} parameter groups, the optimizer has {len(groups)}"
        )
    keys = [_keys(number, *pair) for number, pair in enumerate(zip(saved, groups, strict=True))]
    parts = {}
    for worker, of_worker in worker_groups.items():
        part: dict[str, Any] = {"state": {}, "param_groups": []}
        local = 0
        for group in of_worker:
            numbers = []
            for index in group.indices:
                key = keys[group.number][index]
                if key in state:
                    part["state"][local] = state[key]
                numbers.append(local)
                local += 1
            part["param_groups"].append({**options_of(saved[group.number]), "params": numbers})
        parts[worker] = part
    return parts, [options_of(one) for one in saved]


def _keys(number: int, saved: Mapping[str, Any], group: PlacedGroup) -> list[Any]:
    """Return the keys of a group's parameters in a saved state."""
    keys = list(saved["params"])
    if len(keys) != len(group.params):
        raise ValueError(
            f"parameter group {number} of this state has {len(keys)} parameters, the optimizer's "
            f"has {len(group.params)}"
        )
    return keys


def _initial_values(groups: Sequence[PlacedGroup]) -> list[int]:
    """Return the number of each group's first parameter."""
    return [0, *accumulate(len(group.params) for group in groups)][: len(groups)]


def _param_entries(group: PlacedGroup, start: int) -> dict[str, Any]:
    entries: dict[str, Any] = {"params": list(range(start, start + len(group.params)))}
    if group.named:
        entries["param_names"] = [one.name for one in group.params]
    return entries
