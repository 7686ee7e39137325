"""The tensors of a checkpoint, read into the state of what a rank owns."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.core.forms import map_state
from functional_optim.core.initial import init_leaf
from functional_optim.core.torch_state import to_entries
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
from sharding.zero.optim import load_piece
from sharding.zero.parts import Parts
from sharding.zero.shard_files import Ranges, read_ranges
from sharding.zero.store import Piece
from sharding.zero.tables import SavedTensor

AT_ONCE = 1 << 22
"""Elements that are converted at once, where a parameter can be cut: a multiple of all blocks."""


class Kept(NamedTuple):
    """The state that a checkpoint has."""

    folder: Path
    saved: Mapping[str, SavedTensor]
    """By "path/name"."""
    names: Mapping[str, Sequence[str]]
    """By path, the names of its tensors."""


def read_state(parts: Parts, kept: Kept) -> None:
    """Read the state of every piece: as it lies where it was kept so, else converted."""
    assert parts.shard is not None
    targets = Targets(parts.shard, parts.groups)
    direct: list[tuple[Piece, dict[str, Tensor]]] = []
    others: list[Piece] = []
    for piece, entries in parts.pieces():
        if piece.path not in kept.names:  # it was frozen then: it begins anew
            load_piece(parts.shard, parts.groups, piece, {})
        elif _is_same(piece, entries, kept):
            direct.append((piece, entries))
        else:
            others.append(piece)
    _read_as_it_lies(direct, kept)
    for batch in _batches(others, targets):
        _convert(batch, kept)


def place_of(piece: Piece, key: str, tensor: Tensor) -> tuple[tuple[int, ...], int]:
    """(the shape of a tensor for all of the parameter, where the piece's part begins in it)."""
    assert piece.store is not None
    kind, unit = piece.store.kinds.get(key, "leaf"), piece.store.grain
    if kind == "element":
        return tuple(piece.param.shape), piece.start
    if kind == "block":
        return (-(-piece.param.numel() // unit),), piece.start // unit
    return tuple(tensor.shape), 0


def _is_same(piece: Piece, entries: Mapping[str, Tensor], kept: Kept) -> bool:
    """Whether a checkpoint keeps state as it is kept here."""
    if entries.keys() != set(kept.names[piece.path]):
        return False
    found = {key: kept.saved[f"{piece.path}/{key}"] for key in entries}
    return all(
        found[key][:2] == (tensor.dtype, place_of(piece, key, tensor)[0])
        for key, tensor in entries.items()
    )


def _read_as_it_lies(pieces: Iterable[tuple[Piece, dict[str, Tensor]]], kept: Kept) -> None:
    state: dict[str, Ranges] = {}
    copies: list[tuple[Tensor, Tensor]] = []
    for piece, entries in pieces:
        for key, tensor in entries.items():
            name = f"{piece.path}/{key}"
            if tensor.numel() == 0:
                continue
            shape, start = place_of(piece, key, tensor)
            known = state[name].parts if name in state else {}
            if start in known:  # a number of the leaf, of which this rank owns two ranges
                copies.append((tensor, known[start]))
                continue
            flat = tensor.reshape(-1)
            if not tensor.is_contiguous():
                copies.append((tensor, flat))
            state[name] = Ranges(shape, {**known, start: flat})
    read_ranges(state, kept.folder, kept.saved)
    with torch.no_grad():
        for target, source in copies:
            target.copy_(source.view(target.shape))


class _Job(NamedTuple):
    """Elements [start, stop) of a parameter, whose state is to be converted."""

    piece: Piece
    target: Target
    start: int
    stop: int
    cut: bool
    """Whether it is a range of elements that lie in order, and not a parameter in its shape."""

    def own(self) -> tuple[Tensor, Sequence[Any]]:
        """The parameter there, and the tensors of its state, of which writing in place is seen."""
        piece, chain = self.piece, self.target.chain
        assert piece.store is not None
        if not self.cut:
            return piece.key.detach(), piece.store.shaped(piece, chain).stages
        begin, end = (at - piece.start for at in (self.start, self.stop))
        states = piece.store.cut(piece, chain, self.start, self.stop)
        return piece.key.detach().view(-1)[begin:end], states


def _batches(pieces: Iterable[Piece], targets: Targets) -> Iterator[list[_Job]]:
    """Jobs that are read together: of parameters that differ, and not many elements."""
    batch: dict[str, _Job] = {}
    for job in (job for piece in pieces for job in _jobs(piece, targets.of(piece))):
        size = sum(one.stop - one.start for one in batch.values())
        if job.piece.path in batch or (batch and size + job.stop - job.start > AT_ONCE):
            yield list(batch.values())
            batch = {}
        batch[job.piece.path] = job
    if batch:
        yield list(batch.values())


def _jobs(piece: Piece, target: Target) -> Iterator[_Job]:
    assert piece.store is not None
    if not piece.store.flat or not piece.key.is_contiguous() or not piece.numel:
        yield _Job(piece, target, piece.start, piece.stop, cut=False)
        return
    step = max(1, AT_ONCE // piece.store.grain) * piece.store.grain
    for start in range(piece.start, piece.stop, step):
        yield _Job(piece, target, start, min(start + step, piece.stop), cut=True)


def _convert(jobs: Sequence[_Job], kept: Kept) -> None:
    """Read what some ranges need, and write what it is here."""
    state: dict[str, Ranges] = {}
    found: list[tuple[_Job, dict[str, Tensor], Mapping[str, Span]]] = []
    for job in jobs:
        piece, names = job.piece, kept.names[job.piece.path]
        spans = spans_of(job.target, names, piece.param.numel(), job.start, job.stop)
        in_shape = piece.whole and not job.cut
        entries = {}
        for name in names:
            saved = kept.saved[f"{piece.path}/{name}"]
            begin, end = spans.get(name, (0, saved.numel))
            dtype, device = saved.dtype, piece.key.device
            flat = torch.empty(end - begin, dtype=dtype, device=device)
            if flat.numel():
                state[f"{piece.path}/{name}"] = Ranges(saved.shape, {begin: flat})
            entries[name] = flat if name in spans and not in_shape else flat.view(saved.shape)
        found.append((job, entries, spans))
    read_ranges(state, kept.folder, kept.saved)
    for job, entries, needed in found:
        _write(job, plain_part(job.target, entries, needed, job.start, job.stop))


def _write(job: _Job, entries: dict[str, Any]) -> None:
    piece, target = job.piece, job.target
    param, own = job.own()
    if not param.numel():
        entries = {**_of_no_elements(target, param), **entries}
    state = state_of(target, param, entries, piece.path)
    if gets_digits(list(entries), target, param):
        give_digits(param, target, entries)
    with torch.no_grad():
        piece.step.copy_(state.step)
        for into, values in zip(own, state.stages, strict=True):
            map_state(lambda a, b: a.copy_(b), into, values)


def _of_no_elements(target: Target, param: Tensor) -> dict[str, Tensor]:
    """The entries of an empty parameter: they have no element that could have been lost."""
    form = target.form
    like = param.to(torch.float32) if form.stored else param
    state = init_leaf(form.stages, form.hypers, like)
    return to_entries(form.stages, form.hypers, like, state)
