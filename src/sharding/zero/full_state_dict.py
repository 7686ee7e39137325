"""State of all ranks as one torch.optim state dict, gathered on one rank."""

from typing import Any

import torch
from torch import Tensor

from sharding.zero.collective import run_on_all_ranks
from sharding.zero.local_shards import LocalShards
from sharding.zero.params import indices_of
from sharding.zero.range_step_mixin import RangeStepMixin
from sharding.zero.state_layout import StateLayouts, to_class_entries
from sharding.zero.tree_exchange import exchange_trees

States = dict[int, dict[Any, Any]]
"""The entries of torch.optim, by the number of the parameter."""


def gather_full_state(zero: RangeStepMixin, to: int) -> States | None:
    """Gather the state of every rank on the CPU of one rank; None on other ranks. Collective.

    Other ranks hold only their own part, and a chunk.

    Args:
        zero: the optimizer.
        to: the target rank, in the process group.

    Raises:
        RuntimeError: another rank failed; names the rank, and its error.
        TransportError: a rank died, or did not come; names it.
        TypeError: an entry that is neither a tensor nor a plain value.
        ValueError: ``to`` is not a rank, or differs between ranks.
    """
    group, device, what = zero.process_group, zero.join_device, "collect its state"
    told = run_on_all_ranks(group, device, what, lambda: _checked_rank(to, group.size()))
    if len(set(told)) > 1:
        raise ValueError(f"to must be the same on all ranks, got {told}, in the order of ranks")

    def make() -> dict[int, Any]:  # only the first replica sends
        return {to: local_content(zero)} if zero.rank < zero.plan.shard_ranks else {}

    if zero.shards is None:
        own = exchange_trees(group, device, what, make).values()
        states = {number: entries for content in own for number, entries in content.items()}
    else:
        found: dict[str, dict[str, Tensor]] = {}
        exchange_trees(group, device, what, make, lambda tree: _target_tensors(tree, found))
        states = _to_torch_states(zero, zero.shards, found)
    return dict(sorted(states.items())) if zero.rank == to else None


def _checked_rank(to: int, size: int) -> int:
    if to not in range(size):
        raise ValueError(f"to must be a rank of the process group, 0 to {size - 1}, got {to!r}")
    return to


def local_content(zero: RangeStepMixin) -> Any:
    """Return the state of this rank in the form in which it is sent.

    For a class without functional equivalent, the entries by number of their parameter. Otherwise,
    by path and name of a plain entry, its shape and this rank's ranges, by their first element.
    """
    if zero.shards is None:
        numbers = indices_of(zero.param_groups)
        return {
            numbers[id(param)]: dict(zero.optim.state[param])
            for one in zero.plan.owned(zero.rank)
            if (param := zero.params[one.path]) in zero.optim.state
        }
    found: dict[str, dict[str, tuple[tuple[int, ...], dict[int, Tensor]]]] = {}
    for shard, layout, entries in StateLayouts(zero.shards, zero.param_groups).plain_entries():
        for name, tensor in entries.items():
            shape, start = layout.place_of(shard, name, tensor)
            if start or not shard.start:  # other state belongs to the owner of the first element
                _, ranges = found.setdefault(shard.path, {}).setdefault(name, (shape, {}))
                ranges[start] = tensor.detach().reshape(-1)
    return found


def _target_tensors(content: Any, found: dict[str, dict[str, Tensor]]) -> list[Tensor]:
    """Return the tensors into which the content of a rank is written; add them to ``found``."""
    slots = []
    for path, entries in content.items():
        for name, (shape, ranges) in entries.items():
            for start, one in ranges.items():
                state = found.setdefault(path, {})
                if name not in state:
                    state[name] = torch.empty(shape, dtype=one.dtype, device="cpu")
                slots.append(state[name].view(-1)[start : start + one.numel()])
    return slots


def _to_torch_states(
    zero: RangeStepMixin, shards: LocalShards, states: dict[str, dict[str, Tensor]]
) -> States:
    """Return entries as the imitated class writes them, by the number of their parameter."""
    numbers, found = indices_of(zero.param_groups), States()
    layouts = StateLayouts(shards, zero.param_groups)
    for path, param, layout in layouts.named(zero.params, states):
        fields, late = layout.plain.dtypes, layout.starts_late
        written = to_class_entries(
            states[path], shards.chains.recipe.form, fields, starts_late=late
        )
        if written:
            number = numbers[id(param)]
            found[number] = {key: _like_param(one, param) for key, one in written.items()}
    return found


def _like_param(tensor: Tensor, param: Tensor) -> Tensor:
    """Return a tensor with the strides of its parameter, if it has its shape."""
    if tensor.shape != param.shape or param.is_contiguous():
        return tensor
    return torch.empty_like(param, dtype=tensor.dtype, device="cpu").copy_(tensor)
