"""A state dict of torch.optim, of which each rank takes its part; it stays as it is."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim.state import LeafState
from sharding.zero.local import NOT_OPTIONS, copy_options, options_of
from sharding.zero.optim import ShardOptimizer, copy_state, read_piece
from sharding.zero.parts import Parts
from sharding.zero.shard import Shard
from sharding.zero.store import Piece

Entries = Mapping[str, Any]


def load(parts: Parts, state_dict: Mapping[str, Any]) -> None:
    """Load this rank's part. Nothing is changed where it does not fit.

    Raises:
        ValueError: other groups, or a state that does not fit.
    """
    groups = _new_groups(parts, state_dict)
    states = _states_by_path(parts, state_dict)
    if parts.shard is None:
        _load_foreign(parts, states)
    else:
        _load_shard(parts, parts.shard, groups, states)
    for group, new in zip(parts.groups, groups, strict=True):
        group.update(options_of(new))
    copy_options(parts.groups, parts.optim.param_groups)


def _new_groups(parts: Parts, state_dict: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The groups as they will be."""
    saved = state_dict["param_groups"]
    counts = [len(group["params"]) for group in parts.groups]
    saved_counts = [len(group["params"]) for group in saved]
    if counts != saved_counts:
        raise ValueError(
            f"the state dict has groups of {saved_counts} parameters, this optimizer has groups of "
            f"{counts}; they must be the same"
        )
    groups = []
    for group, one in zip(parts.groups, saved, strict=True):
        options = {key: _own(value) for key, value in one.items() if key not in NOT_OPTIONS}
        for key, value in parts.form.options.items():
            told = options.pop(key, value)
            if told != value and options.get("weight_decay", group.get("weight_decay")):
                raise ValueError(f"the state dict has {key}={told!r}, this chain {key}={value!r}")
        if not parts.form.options and "decoupled_weight_decay" not in group:
            told = options.pop("decoupled_weight_decay", False)
            if told and options.get("weight_decay", 0.0) and parts.shard is not None:
                raise ValueError(
                    "the state dict has decoupled weight decay, this chain has not: "
                    f"{parts.shard.recipe.optimizer}"
                )
        groups.append({**group, **options})
    return groups


def _states_by_path(parts: Parts, state_dict: Mapping[str, Any]) -> dict[str, Entries]:
    """The entries of each parameter, by path."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    params = [param for group in parts.groups for param in group["params"]]
    paths = {id(param): path for path, param in parts.params.items()}
    by_number = {number: paths[id(param)] for number, param in zip(numbers, params, strict=True)}
    unknown = [number for number in state_dict["state"] if number not in by_number]
    if unknown:
        raise ValueError(
            f"the state dict has state for the parameter {unknown[0]!r}, which is in none of its "
            f"groups ({len(numbers)} parameters)"
        )
    return {by_number[number]: entries for number, entries in state_dict["state"].items()}


def _load_shard(
    parts: Parts, shard: Shard, groups: Sequence[dict[str, Any]], states: Mapping[str, Entries]
) -> None:
    assert isinstance(parts.optim, ShardOptimizer)
    for number, group in enumerate(groups):
        shard.check_options(number, group)
    read = [
        (piece, read_part(shard, groups, piece, states.get(piece.path) or {}))
        for piece in shard.every()
        if piece.store is not None or states.get(piece.path)
    ]
    shard.remake(groups, states)
    for piece, state in read:
        copy_state(shard, groups, piece, state)
    copy_options(groups, parts.optim.param_groups)
    parts.optim.show()


def read_part(
    shard: Shard, groups: Sequence[dict[str, Any]], piece: Piece, entries: Entries
) -> LeafState:
    """A piece's part of a parameter's entries, checked."""
    kinds, unit, like = shard.layout(piece, groups)
    part = {}
    for key, value in entries.items():
        if not isinstance(value, Tensor):
            part[key] = value
            continue
        kind = kinds.get(key, "leaf")
        found = value.detach()
        if not piece.whole and kind != "leaf":
            step = unit if kind == "block" else 1
            wanted = -(-piece.param.numel() // step)
            if found.numel() != wanted:
                raise ValueError(
                    f"the state {key} of {piece.path!r} has {found.numel()} elements, wanted are "
                    f"{wanted}"
                )
            found = found.reshape(-1)[piece.start // step : -(-piece.stop // step)]
        if key in like:
            same = found.is_floating_point() and like[key].is_floating_point()
            found = found.to(like[key].device, like[key].dtype if same else found.dtype)
        part[key] = found
    return read_piece(shard, groups, piece, part)


def _load_foreign(parts: Parts, states: Mapping[str, Entries]) -> None:
    for one in parts.plan.owned(parts.rank):
        param = parts.params[one.path]
        entries = states.get(one.path)
        if entries:
            parts.optim.state[param] = _placed(entries, param.device)
        else:
            parts.optim.state.pop(param, None)


def _placed(value: Any, device: torch.device) -> Any:
    """A copy, on the device of a parameter; numbers in tensors on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().to(device if value.dim() else "cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _placed(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_placed(item, device) for item in value)
    return value


def _own(value: Any) -> Any:
    """An option that shares no memory with the caller's."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value
