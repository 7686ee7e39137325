"""The state of all ranks as one torch.optim state dict, collected on one rank."""

from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.storage.plain import decoded
from sharding.transport import TransportError
from sharding.zero.collective import together
from sharding.zero.convert import Targets, as_class_writes
from sharding.zero.params import indices_of
from sharding.zero.parts import OptimizerParts, own_state
from sharding.zero.stream import Stream, check_travels, emptied, tensors_in

States = dict[int, dict[Any, Any]]
"""By the number of a parameter, its entries, as torch.optim has them."""


class Collected(NamedTuple):
    """State of all ranks since the last step."""

    to: int
    """The rank that has it."""
    states: States | None
    """The state, on that rank."""


def collected(parts: OptimizerParts, to: int) -> States | None:
    """The state of every rank, on the CPU of one. Collective.

    No rank but that one holds more than its own share and a chunk.

    Args:
        parts: of the optimizer.
        to: the rank, in the process group, that is to have it.

    Returns:
        The states, on that rank; None on the others.

    Raises:
        RuntimeError: another rank could not; names it, and says why.
        TransportError: a rank died, or did not come; names it.
        TypeError: an entry that is neither tensor nor plain value.
        ValueError: a rank that there is not, or another one than the other ranks say.
    """
    own: list[Any] = []

    def prepare() -> int:
        size = parts.process_group.size()
        if to not in range(size):
            raise ValueError(f"to must be a rank of the process group, 0 to {size - 1}, got {to!r}")
        if parts.rank < parts.plan.shard_ranks:  # of replicas, the first one sends
            own.append(own_content(parts))
            check_travels(own)
        return to

    # Whatever can fail on one rank fails here: later on, another one may wait for it.
    told = together(parts.process_group, parts.device, "prepare its state to be collected", prepare)
    if len(set(told)) > 1:
        raise ValueError(f"to must be the same on all ranks, got {told}, in the order of ranks")
    if parts.rank == to:
        return _received(parts, own[0] if own else None)
    if parts.rank < parts.plan.shard_ranks:
        _sent(Stream(parts.process_group, to, parts.device), own[0])
    return None


def _sent(stream: Stream, own: Any) -> None:
    """Send what this rank has, when its turn comes."""
    trouble = stream.receive()
    if trouble is not None:
        raise TransportError(trouble)
    stream.send(own)


def _received(parts: OptimizerParts, own: Any) -> States:
    """Take what each rank has, one after the other; if one of them is lost, the rest is told."""
    found: dict[Any, Any] = {}
    streams = {
        rank: Stream(parts.process_group, rank, parts.device)
        for rank in range(parts.plan.shard_ranks)
        if rank != parts.rank
    }
    whole = parts.shards is None
    if parts.rank < parts.plan.shard_ranks:
        slots = _slots(emptied(own), found, whole=whole)
        for into, value in zip(tensors_in(slots), tensors_in(own), strict=True):
            into.copy_(value)
    while streams:
        stream = streams.pop(min(streams))
        try:
            stream.send(None)
            stream.receive(lambda coming: _slots(coming, found, whole=whole))
        except BaseException as error:
            for other in streams.values():
                with suppress(TransportError):
                    other.send(f"{type(error).__name__}: {error}")
            raise
    return dict(sorted((found if whole else _as_torch(parts, found)).items()))


def own_content(parts: OptimizerParts) -> Any:
    """Return this rank's content in the form that is sent.

    Of a class of which nothing is known, entries by the number of their parameter. Otherwise, by
    the key of a tensor, its shape and the ranges that this rank has of it, by their first element.
    """
    if parts.shards is None:
        numbers = indices_of(parts.groups)
        return {
            numbers[id(param)]: dict(parts.optim.state[param])
            for one in parts.plan.owned(parts.rank)
            if (param := parts.params[one.path]) in parts.optim.state
        }
    return {key: list(one) for key, one in own_state(parts).items()}


def _slots(content: Any, found: dict[Any, Any], *, whole: bool) -> Any:
    """Return the tensors into which a received content is written.

    Args:
        content: of one rank, its tensors without values.
        found: takes all tensors.
        whole: whether the content is of parameters that one rank owns whole.
    """
    if whole:
        found.update(content)
        return content
    slots = []
    for key, (shape, ranges) in content.items():
        for start, one in ranges.items():
            if key not in found:
                found[key] = torch.empty(shape, dtype=one.dtype, device="cpu")
            slots.append(found[key].view(-1)[start : start + one.numel()])
    return slots


def _as_torch(parts: OptimizerParts, tensors: dict[str, Tensor]) -> States:
    """Entries as the class meant writes them, by the number of their parameter."""
    numbers, found = indices_of(parts.groups), States()
    names: dict[str, list[str]] = {}
    for key in tensors:
        path, _, name = key.rpartition("/")
        names.setdefault(path, []).append(name)
    targets = Targets(parts.known_shards, parts.groups)
    for path, param, target in targets.named(parts.params, names):
        entries = {name: tensors.pop(f"{path}/{name}") for name in names[path]}
        if target.plain.stored:
            entries = decoded(entries, target.plain.dtypes)
        fields, late = target.plain.dtypes, target.starts_late(param)
        written = as_class_writes(entries, parts.schema, fields, starts_late=late)
        if written:
            found[numbers[id(param)]] = {key: _laid(one, param) for key, one in written.items()}
    return found


def _laid(tensor: Tensor, param: Tensor) -> Tensor:
    """A tensor with the strides of its parameter, where it has its shape."""
    if tensor.shape != param.shape or param.is_contiguous():
        return tensor
    return torch.empty_like(param, dtype=tensor.dtype, device="cpu").copy_(tensor)
