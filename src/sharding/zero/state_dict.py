"""The state of all ranks as one torch.optim state dict, collected on one rank."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.torch_state import starts_in_first_step
from functional_optim.frontends.torch_checkpoint import torch_step
from functional_optim.storage.plain import decoded
from sharding.transport import TransportError
from sharding.zero.collective import together
from sharding.zero.convert import Target, Targets
from sharding.zero.local_shard import LocalShard
from sharding.zero.params import indices_of
from sharding.zero.parts import Parts
from sharding.zero.stream import Stream, check_travels, emptied, tensors_in

States = dict[int, dict[Any, Any]]
"""By the number of a parameter, its entries, as torch.optim has them."""

Portion = dict[str, Any]
"""What one rank has of a parameter's entries: "number", "path", "start", "whole", "grain",
"kinds" by key, "entries", and, where those are not plain, "fields": the names of plain ones."""


def collected(parts: Parts, to: int) -> States | None:
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
    own: list[Portion] = []

    def prepare() -> int:
        size = parts.process_group.size()
        if to not in range(size):
            raise ValueError(f"to must be a rank of the process group, 0 to {size - 1}, got {to!r}")
        if parts.rank < parts.plan.shard_ranks:  # of replicas, the first one sends
            own.extend(own_portions(parts))
            check_travels(own)
        return to

    # Whatever can fail on one rank fails here: later on, another one may wait for it.
    told = together(parts.process_group, parts.device, "prepare its state to be collected", prepare)
    if len(set(told)) > 1:
        raise ValueError(f"to must be the same on all ranks, got {told}, in the order of ranks")
    if parts.rank == to:
        return _received(parts, own)
    if parts.rank < parts.plan.shard_ranks:
        _sent(Stream(parts.process_group, to, parts.device), own)
    return None


def _sent(stream: Stream, own: Sequence[Portion]) -> None:
    """Send what this rank has, when its turn comes."""
    trouble = stream.receive()
    if trouble is not None:
        raise TransportError(trouble)
    stream.send(len(own))
    for portion in own:
        stream.send(portion)


def _received(parts: Parts, own: Sequence[Portion]) -> States:
    """Take what each rank has, one after the other; if one of them is lost, the rest is told."""
    found: States = {}
    streams = {
        rank: Stream(parts.process_group, rank, parts.device)
        for rank in range(parts.plan.shard_ranks)
        if rank != parts.rank
    }
    for portion in own:
        _enter(portion, found, parts)
    while streams:
        stream = streams.pop(min(streams))
        try:
            stream.send(None)
            for _ in range(stream.receive()):
                portion = stream.receive(lambda coming: _place_of(coming, found, parts))
                if "fields" in portion:
                    _enter(portion, found, parts)
        except BaseException as error:
            for other in streams.values():
                with suppress(TransportError):
                    other.send(f"{type(error).__name__}: {error}")
            raise
    return dict(sorted(found.items()))


def own_portions(parts: Parts) -> list[Portion]:
    """What this rank has, as torch.optim would write it; nothing where that writes nothing."""
    numbers = indices_of(parts.groups)
    if parts.shards is None:
        return [
            {"number": numbers[id(param)], "whole": True, "entries": dict(parts.optim.state[param])}
            for one in parts.plan.owned(parts.rank)
            if (param := parts.params[one.path]) in parts.optim.state
        ]
    found: list[Portion] = []
    targets = Targets(parts.shards, parts.groups)
    for shard, entries in parts.with_state():
        target = targets.of(shard)
        written = _written(parts, shard, target, entries)
        if written:
            found.append(
                {
                    "number": numbers[id(shard.param)],
                    "path": shard.path,
                    "start": shard.start,
                    "whole": shard.whole,
                    "grain": target.unit,
                    "kinds": {**target.kinds, **dict.fromkeys(target.form.extras, "element")},
                    "entries": written,
                    **({"fields": list(target.form.dtypes)} if target.form.stored else {}),
                }
            )
    return found


def _written(
    parts: Parts, shard: LocalShard, target: Target, entries: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Entries as the class meant writes them."""
    form, step = parts.form, int(entries["step"])
    if step == 0 and not form.eager:
        return {}
    rest = {key: value for key, value in entries.items() if key != "step"}
    if not form.counts_steps:
        return rest
    plain = target.form
    like = shard.tensor.detach().new_empty(0, dtype=torch.float32) if plain.stored else shard.tensor
    if step == 0 and starts_in_first_step(plain.stages, plain.hypers, like):
        # torch would take a buffer of zeros for one of a later step.
        rest = {key: rest[key] for key in plain.extras}
    return {"step": torch_step(entries["step"]), **rest}


def _enter(portion: Portion, found: States, parts: Parts) -> None:
    """Copy the values of a portion to the result, as plain ones."""
    if "fields" in portion:
        portion = {**portion, "entries": decoded(portion["entries"], portion["fields"])}
    target = _placed(emptied(portion), found, parts)
    for into, value in zip(tensors_in(target), tensors_in(portion), strict=True):
        into.copy_(value)


def _place_of(portion: Portion, found: States, parts: Parts) -> Any:
    """Where a portion that is coming is to be written: where it stays, if it is plain."""
    return portion if "fields" in portion else _placed(portion, found, parts)


def _placed(portion: Portion, found: States, parts: Parts) -> Any:
    """Where the tensors of a portion are to be written: those of the result, or slices of them."""
    entries = portion["entries"]
    number = portion["number"]
    if portion["whole"]:
        found[number] = entries
        return portion
    into = found.setdefault(number, {})
    param = parts.params[portion["path"]]
    targets = {}
    for key, value in entries.items():
        kind = portion["kinds"].get(key, "leaf")
        if kind == "leaf":
            targets[key] = into[key] = value
            continue
        unit = portion["grain"] if kind == "block" else 1
        shape = param.shape if kind == "element" else (-(-param.numel() // unit),)
        if key not in into:
            into[key] = torch.empty(shape, dtype=value.dtype, device="cpu")
        begin = portion["start"] // unit
        targets[key] = into[key].view(-1)[begin : begin + value.numel()]
    return {"entries": targets}
