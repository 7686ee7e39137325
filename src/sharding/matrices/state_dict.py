"""State dict of a MatrixOwnerOptimizer: this rank's part of the state of all ranks."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from functional_optim.engine.options import params_of_groups
from functional_optim.engine.states import has_begun, match_params
from functional_optim.engine.tensors import full_tensor, to_local
from sharding.checkpoint.flat_ranges import FlatRanges, OnOtherRanks, check_origin
from sharding.matrices.owners import Owners
from sharding.matrices.shard_group import is_cut
from sharding.transport.groups import format_ranks
from sharding.transport.protocol import Range
from sharding.zero.sharded_state_dict import sharded_groups

Groups = Sequence[Mapping[str, Any]]


def part_of_state(state_dict: Mapping[str, Any], groups: Groups, owners: Owners) -> dict[str, Any]:
    """Return this rank's state dict as ``torch.distributed.checkpoint`` saves and loads it.

    The owner of a matrix has the state of all its rows. Each rank has the state of its rows of
    other sharded parameters. State of replicated parameters is whole on all ranks.
    """
    origin, states = _origin(owners), dict(state_dict["state"])
    stepped = {id(one.param) for one in owners.exchange.matrices}
    keys = params_of_groups(state_dict["param_groups"])
    for key, param in zip(keys, params_of_groups(groups), strict=True):
        here = owners.stand_ins.by_param.get(id(param))
        if here is None:
            has_owner = id(param) in stepped or param.requires_grad
            states[key] = OnOtherRanks(origin) if has_owner else {}
        elif is_cut(param):
            rows = None if here.is_matrix else _own_rows(owners, param)
            part = partial(_part, param=param, rows=rows, origin=origin)
            states[key] = map_tensors(part, states[key])
    groups = sharded_groups(state_dict["param_groups"])
    return {**state_dict, "state": states, "param_groups": groups}


def _part(value: Tensor, param: Tensor, rows: Range | None, origin: str) -> FlatRanges:
    """Return an entry as a range of the entry for the whole parameter."""
    shape, start = tuple(value.shape), 0
    if rows is not None and shape and shape[0] == rows[1] - rows[0]:
        start = rows[0] * (value.numel() // shape[0])
        shape = (param.shape[0], *shape[1:])
    flat = value.detach().reshape(-1)
    return FlatRanges(shape, {start: flat}, value.dtype, value.device, origin)


def local_state(
    state_dict: Mapping[str, Any],
    groups: Groups,
    owners: Owners,
    activate: Callable[[Sequence[str]], None],
) -> dict[str, Any]:
    """Return the part of a state dict that belongs to this rank.

    From the state of whole parameters, the owner of a matrix takes the state of the matrix. For
    other parameters, each rank takes its rows of entries that have as many rows as the parameter.
    Entries may be DTensors. State that is a part already is not cut. ``activate`` is called, on all
    ranks, with the paths of matrices that have state, or may get it, for the first time.

    Raises:
        ValueError: parts of another rank or plan.
    """
    keys = params_of_groups(match_params(state_dict, groups))
    params = params_of_groups(groups)
    if len(keys) != len(params):
        return dict(state_dict)  # torch raises the error
    paths = {id(param): path for path, param in owners.params.items()}
    given = {
        paths[id(param)]: entries
        for key, param in zip(keys, params, strict=True)
        if (entries := state_dict["state"].get(key)) is not None
    }
    check_origin(given, _origin(owners), format_ranks(owners.shards.group, [owners.shards.rank]))
    late = [
        path
        for path, one in owners.idle.items()
        if one.requires_grad or _may_have_begun(given.get(path, {}))
    ]
    if late:
        activate(late)
    matrices, owned = owners.matrices(), {*owners.owned()}
    states: dict[Any, Any] = {}
    for key, param in zip(keys, params, strict=True):
        path = paths[id(param)]
        entries = given.get(path, {})
        if path in matrices or not is_cut(param):
            # On all ranks, since this is a collective for a DTensor.
            found = map_tensors(partial(_own_part, param=param, rows=None), entries)
            is_stepped = id(param) in owners.stand_ins.by_param  # else it was never stepped
            states[key] = found if path not in matrices or (path in owned and is_stepped) else {}
            continue
        rows = _own_rows(owners, param)
        take = partial(_own_part, param=param, rows=rows)
        states[key] = map_tensors(take, entries) if rows[0] < rows[1] else {}
    return {**state_dict, "state": states}


def _may_have_begun(entries: Mapping[str, Any]) -> bool:
    """Return False for entries of a parameter that was never stepped."""
    if isinstance(entries, OnOtherRanks):
        return True  # the owner has entries
    is_part = any(isinstance(one, FlatRanges) for one in entries.values())
    return bool(entries) and (is_part or "step" not in entries or has_begun(entries))


def map_tensors(change: Callable[[Tensor], Tensor], entries: Mapping[str, Any]) -> dict[str, Any]:
    pairs = entries.items()
    return {name: change(one) if isinstance(one, Tensor) else one for name, one in pairs}


def _own_part(value: Tensor, param: Tensor, rows: Range | None) -> Tensor:
    """Return the part of an entry that this rank steps: all of it, or some rows."""
    has_rows = value.dim() > 0 and value.shape[0] == param.shape[0]
    if isinstance(value, FlatRanges):
        (flat,) = value.current.values()
        if rows is None or not has_rows:
            return flat.view(value.shape)
        return flat.view(rows[1] - rows[0], *value.shape[1:])
    if rows is None:
        return full_tensor(value)
    own = to_local(value)
    return value[slice(*rows)] if own is value and has_rows else own


def _own_rows(owners: Owners, param: Tensor) -> Range:
    return owners.shards.rows(param.shape[0])[owners.shards.rank]


def _origin(owners: Owners) -> str:
    """Return an identifier of this rank's part: equal only for the same rank of an equal plan."""
    shards = owners.shards
    return f"rank {shards.rank} of {shards.size} with plan {owners.plan.digest[:16]}"
