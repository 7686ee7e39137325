"""State dicts of all workers as one of torch's form, and back."""

from collections.abc import Mapping, Sequence
from typing import Any

from functional_optim.frontends.checkpoint_names import matched_by_name
from functional_optim.frontends.torch_groups import options_of
from functional_optim.remote.placing import PlacedGroup
from functional_optim.remote.worker import Share

Shares = Mapping[str, Sequence[Share]]


def merged(
    parts: Mapping[str, Mapping[str, Any]],
    shares: Shares,
    groups: Sequence[PlacedGroup],
    param_groups: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Merge the workers' state dicts into one in torch's form, with the names of parameters.

    Args:
        parts: the state dict of each worker.
        shares: what every worker has.
        groups: all of them.
        param_groups: the same, with their options.
    """
    first = _firsts(groups)
    made = list(map(options_of, param_groups))
    state: dict[int, Any] = {}
    for worker, part in parts.items():
        for share, group in zip(shares[worker], part["param_groups"], strict=True):
            one = made[share.number]
            for key, value in options_of(group).items():
                # A class that counts steps for a group: the largest count, as torch has one.
                one[key] = max(one.get(key, 0), value) if key == "step" else one.get(key, value)
            for place, local in zip(share.places, group["params"], strict=True):
                if local in part["state"]:
                    state[first[share.number] + place] = part["state"][local]
    return {
        "state": dict(sorted(state.items())),
        "param_groups": [
            {**one, **_numbers(group, start)}
            for one, group, start in zip(made, groups, first, strict=True)
        ],
        "workers": {
            worker: [name for share in shares[worker] for name, _ in share.params]
            for worker in parts
        },
    }


def cut(
    state_dict: Mapping[str, Any], shares: Shares, groups: Sequence[PlacedGroup]
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Return the state dict for each worker, and the options of each group.

    Where the state dict and these groups have names, they are matched by name, and otherwise by
    their place, as in torch.

    Raises:
        KeyError: no state dict of torch's form.
        ValueError: other groups, or other parameters in them.
    """
    here = [_numbers(group, start) for group, start in zip(groups, _firsts(groups), strict=True)]
    saved, state = matched_by_name(state_dict["param_groups"], here), state_dict["state"]
    if len(saved) != len(groups):
        raise ValueError(
            f"this state has {len(saved)} parameter groups, the optimizer has {len(groups)}"
        )
    keys = [_keys(number, *pair) for number, pair in enumerate(zip(saved, groups, strict=True))]
    found = {}
    for worker, own in shares.items():
        part: dict[str, Any] = {"state": {}, "param_groups": []}
        local = 0
        for share in own:
            numbers = []
            for place in share.places:
                key = keys[share.number][place]
                if key in state:
                    part["state"][local] = state[key]
                numbers.append(local)
                local += 1
            part["param_groups"].append({**options_of(saved[share.number]), "params": numbers})
        found[worker] = part
    return found, [options_of(one) for one in saved]


def _keys(number: int, saved: Mapping[str, Any], group: PlacedGroup) -> list[Any]:
    """Return the key of each of a group's parameters in a saved state."""
    keys = list(saved["params"])
    if len(keys) != len(group.params):
        raise ValueError(
            f"parameter group {number} of this state has {len(keys)} parameters, the optimizer's "
            f"has {len(group.params)}"
        )
    return keys


def _firsts(groups: Sequence[PlacedGroup]) -> list[int]:
    """The number of each group's first parameter."""
    found, start = [], 0
    for group in groups:
        found.append(start)
        start += len(group.params)
    return found


def _numbers(group: PlacedGroup, start: int) -> dict[str, Any]:
    numbers: dict[str, Any] = {"params": list(range(start, start + len(group.params)))}
    if group.named:
        numbers["param_names"] = [one.name for one in group.params]
    return numbers
