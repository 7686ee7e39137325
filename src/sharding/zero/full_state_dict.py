"""State of all ranks as one torch.optim state dict, gathered on one rank."""

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from sharding.transport import TransportError
from sharding.zero.collective import run_on_all_ranks
from sharding.zero.local_shards import LocalShards
from sharding.zero.params import indices_of
from sharding.zero.range_step_mixin import RangeStepMixin
from sharding.zero.state_layout import StateLayouts, to_class_entries
from sharding.zero.stream import Stream, check_can_send, empty_copy, list_tensors

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
    own: list[Any] = []

    def prepare() -> int:
        size = zero.process_group.size()
        if to not in range(size):
            raise ValueError(f"to must be a rank of the process group, 0 to {size - 1}, got {to!r}")
        if zero.rank < zero.plan.shard_ranks:  # only the first replica sends
            own.append(local_content(zero))
            check_can_send(own)
        return to

    # Errors must be raised before the first message, since another rank may wait for the second.
    told = run_on_all_ranks(
        zero.process_group, zero.join_device, "prepare its state to be collected", prepare
    )
    if len(set(told)) > 1:
        raise ValueError(f"to must be the same on all ranks, got {told}, in the order of ranks")
    if zero.rank == to:
        return _receive_states(zero, own[0] if own else None)
    if zero.rank < zero.plan.shard_ranks:
        stream = Stream(zero.process_group, to, zero.join_device)
        error = stream.receive()
        if error is not None:
            raise TransportError(error)
        stream.send(own[0])
    return None


def _receive_states(zero: RangeStepMixin, own: Any) -> States:
    """Receive the state of one rank after another. If a rank is lost, tell the remaining ranks."""
    found: dict[Any, Any] = {}
    streams = {
        rank: Stream(zero.process_group, rank, zero.join_device)
        for rank in range(zero.plan.shard_ranks)
        if rank != zero.rank
    }
    whole = zero.shards is None
    if zero.rank < zero.plan.shard_ranks:
        slots = _target_tensors(empty_copy(own), found, whole=whole)
        for into, value in zip(list_tensors(slots), list_tensors(own), strict=True):
            into.copy_(value)
    while streams:
        stream = streams.pop(min(streams))
        try:
            stream.send(None)
            stream.receive(lambda coming: _target_tensors(coming, found, whole=whole))
        except BaseException as error:
            for other in streams.values():
                with suppress(TransportError):
                    other.send(f"{type(error).__name__}: {error}")
            raise
    return dict(
        sorted(
            (found if zero.shards is None else _to_torch_states(zero, zero.shards, found)).items()
        )
    )


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


def _target_tensors(content: Any, found: dict[Any, Any], *, whole: bool) -> Any:
    """Return the tensors into which the content of a rank is written; add them to ``found``."""
    if whole:
        found.update(content)
        return content
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
