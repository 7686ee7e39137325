"""The tensors of a checkpoint, read into the state of what a rank owns."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.core.initial import init_leaf
from functional_optim.core.state import LeafState
from functional_optim.core.torch_state import to_entries
from functional_optim.optimizer.bound_buffer import copy_states
from sharding.zero.convert import (
    Span,
    Target,
    Targets,
    gets_digits,
    give_digits,
    plain_part,
    spans_of,
    state_of,
)
from sharding.zero.local_shard import LocalShard
from sharding.zero.parts import OptimizerParts
from sharding.zero.shard_files import Ranges, read_ranges
from sharding.zero.tables import SavedTensor

AT_ONCE = 1 << 22
"""Elements that are converted at once, where a parameter can be cut: a multiple of all blocks."""


class SavedState(NamedTuple):
    """The state that a checkpoint has."""

    folder: Path
    tensors: Mapping[str, SavedTensor]
    """By "path/name"."""
    names: Mapping[str, Sequence[str]]
    """By path, the names of its tensors."""


def read_state(parts: OptimizerParts, source: SavedState) -> None:
    """Read the state of every shard: as it lies where it was saved so, else converted."""
    targets = Targets(parts.known_shards, parts.groups)
    direct: list[Part] = []
    for shard, entries in parts.with_state():
        chain = parts.known_shards.chain_of(shard, parts.groups)
        places = {key: shard.place_of(chain, key, one) for key, one in entries.items()}
        if shard.path not in source.names:  # it was frozen then: it begins anew
            shard.write(chain, shard.read(chain, {}))
        elif _is_same(shard, entries, places, source):
            direct += [(f"{shard.path}/{key}", *places[key], one) for key, one in entries.items()]
        else:
            _convert(shard, targets.of(shard), source)
    _read_as_it_lies(direct, source)


Part = tuple[str, tuple[int, ...], int, Tensor]
"""The key of a saved tensor, its shape, where a shard's part of it begins, and that part."""


def _is_same(
    shard: LocalShard,
    entries: Mapping[str, Tensor],
    places: Mapping[str, tuple[tuple[int, ...], int]],
    source: SavedState,
) -> bool:
    """Return True if a checkpoint has state as it is kept here."""
    if entries.keys() != set(source.names[shard.path]):
        return False
    found = {key: source.tensors[f"{shard.path}/{key}"] for key in entries}
    return all(found[key][:2] == (one.dtype, places[key][0]) for key, one in entries.items())


def _read_as_it_lies(parts: Iterable[Part], source: SavedState) -> None:
    state: dict[str, Ranges] = {}
    copies: list[tuple[Tensor, Tensor]] = []
    for name, shape, start, tensor in parts:
        if tensor.numel():
            known = state[name].parts if name in state else {}
            if start in known:  # a number of the leaf, of which this rank owns two ranges
                copies.append((tensor, known[start]))
                continue
            flat = tensor.reshape(-1)
            if not tensor.is_contiguous():
                copies.append((tensor, flat))
            state[name] = Ranges(shape, {**known, start: flat})
    read_ranges(state, source.folder, source.tensors)
    with torch.no_grad():
        for into, values in copies:
            into.copy_(values.view(into.shape))


def _convert(shard: LocalShard, target: Target, source: SavedState) -> None:
    """Read what a shard needs of a state that was saved otherwise; some blocks at a time."""
    chain = target.chain
    if shard.numel <= AT_ONCE or not shard.can_be_cut(chain):
        _convert_range(shard, target, source, (shard.start, shard.stop), None)
        return
    for start in range(shard.start, shard.stop, AT_ONCE):
        span = (start, min(start + AT_ONCE, shard.stop))
        _convert_range(shard, target, source, span, shard.part(chain, *span))


def _convert_range(
    shard: LocalShard,
    target: Target,
    source: SavedState,
    span: Span,
    part: tuple[Tensor, LeafState] | None,
) -> None:
    """Read what elements [start, stop) need, and write what it is here.

    Args:
        shard: that has them.
        target: what its state is.
        source: where it is read from.
        span: the elements, counted in the parameter.
        part: the parameter there, and its state, laid flat; None for all of the shard.
    """
    state: dict[str, Ranges] = {}
    names, (start, stop) = source.names[shard.path], span
    spans = spans_of(target, names, shard.param.numel(), start, stop)
    entries: dict[str, Any] = {}
    for name in names:
        saved = source.tensors[f"{shard.path}/{name}"]
        begin, end = spans.get(name, (0, saved.numel))
        flat = torch.empty(end - begin, dtype=saved.dtype, device=shard.tensor.device)
        if flat.numel():
            state[f"{shard.path}/{name}"] = Ranges(saved.shape, {begin: flat})
        is_whole = name not in spans or (shard.whole and part is None)
        entries[name] = flat.view(saved.shape) if is_whole else flat
    read_ranges(state, source.folder, source.tensors)
    entries = plain_part(target, entries, spans, start, stop)
    param, own = part or (shard.tensor.detach(), shard.state_for(target.chain))
    if not param.numel():
        entries = {**_of_no_elements(target, param), **entries}
    made = state_of(target, param, entries, shard.path)
    if gets_digits(list(entries), target, param):
        give_digits(param, target, entries)
    copy_states([own], [made])


def _of_no_elements(target: Target, param: Tensor) -> dict[str, Tensor]:
    """The entries of an empty parameter: they have no element that could have been lost."""
    form = target.plain
    like = param.to(torch.float32) if form.stored else param
    state = init_leaf(form.stages, form.hypers, like)
    return to_entries(form.stages, form.hypers, like, state)
