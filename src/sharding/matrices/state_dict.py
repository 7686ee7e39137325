"""State dicts of one rank of a MatrixOwnerOptimizer: its own, and what it takes of a whole one."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from functional_optim.core.dtensors import local, whole
from functional_optim.frontends.checkpoint_names import matched_by_name
from functional_optim.frontends.torch_groups import params_of_groups
from sharding.matrices.owners import Owners
from sharding.matrices.shard_group import is_cut

SHARD = "state of one rank, which torch.distributed.checkpoint cannot read"
"""The key of ``state`` that says whose it is.

torch's helpers for checkpoints take each key for a parameter, and raise a KeyError with this text.
Otherwise they would save one rank's rows as the whole state of a parameter.
"""


def shard_entry(owners: Owners) -> dict[str, Any]:
    """Return what a state dict says of the rank that wrote it."""
    shards = owners.shards
    return {"rank": int(shards.rank), "ranks": shards.size, "owned": owners.owned()}


def check_saved_here(entry: Any, here: Mapping[str, Any]) -> None:
    """Make sure that a state dict was written by this rank of as many.

    Args:
        entry: of the state dict.
        here: that of this rank.

    Raises:
        ValueError: they differ.
    """
    if entry != here:
        raise ValueError(
            f"this state dict is of {_text(entry)}, and this is {_text(here)}; each rank loads "
            "what the same rank of as many saved, with the same matrices, policy and cost, or the "
            "whole state of one process"
        )


def _text(entry: Any) -> str:
    if not isinstance(entry, Mapping):
        return repr(entry)
    owned = entry.get("owned") or []
    return f"rank {entry.get('rank')} of {entry.get('ranks')}, which owns {len(owned)} matrices"


def local_state(
    state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], owners: Owners
) -> dict[str, Any]:
    """Return what of the state of whole parameters belongs to this rank.

    State of a matrix is taken by its owner, and of other parameters by all that step a part of
    them: entries that have as many rows as the parameter are cut as that is. Entries may be
    DTensors.

    Args:
        state_dict: of a TorchOptimizer, or of a class of torch.optim, in one process.
        groups: the parameter groups of the optimizer.
        owners: of the parameters.
    """
    keys = params_of_groups(matched_by_name(state_dict["param_groups"], groups))
    params = params_of_groups(groups)
    states: dict[Any, Any] = {SHARD: shard_entry(owners)}
    if len(keys) != len(params):
        return dict(state_dict)  # torch says what is wrong with it
    paths = {id(param): path for path, param in owners.params.items()}
    matrices, owned = owners.matrices(), {*owners.owned()}
    for key, param in zip(keys, params, strict=True):
        entries, path = state_dict["state"].get(key), paths[id(param)]
        if entries is None:
            continue
        if path in matrices or not is_cut(param):
            found = map_tensors(whole, entries)  # on all ranks: of a DTensor, a collective
            if path not in matrices or path in owned:
                states[key] = found
            continue
        start, stop = owners.shards.rows(param.shape[0])[owners.shards.rank]
        if start < stop:
            states[key] = map_tensors(partial(_rows, param=param, start=start, stop=stop), entries)
    return {**state_dict, "state": states}


def map_tensors(change: Callable[[Tensor], Tensor], entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return entries with other tensors in the place of theirs."""
    pairs = entries.items()
    return {name: change(one) if isinstance(one, Tensor) else one for name, one in pairs}


def _rows(value: Tensor, param: Tensor, start: int, stop: int) -> Tensor:
    own = local(value)
    if own is value and value.dim() > 0 and value.shape[0] == param.shape[0]:
        return value[start:stop]
    return own
