"""How elements travel between ranks: long runs as they lie, short ones packed.

A message costs about as much as copying some hundred kilobytes. Whichever way elements go, a route
is made once for the tensors that it moves, and used at every step: gathers of parameters take it
from the owners, reductions of gradients to them.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim._torch import foreach_copy_
from sharding.transport import Range

DIRECT = 1 << 16
"""Elements from which a run is worth a message of its own."""
PACK = 1 << 20
"""Most elements that are packed together."""


class Span(NamedTuple):
    """Elements of a flat tensor, and who owns them."""

    start: int
    stop: int
    rank: int


class Owned(NamedTuple):
    """A tensor that one rank owns all of."""

    tensor: Tensor
    rank: int


class Direct(NamedTuple):
    """Ranges that go as they lie."""

    flat: Tensor
    ranges: tuple[Range, ...]


class Pack(NamedTuple):
    """Short runs that go together, side by side in the order of their owners."""

    length: int
    views: tuple[Tensor, ...]
    """Where they come from and go to."""
    sizes: tuple[int, ...]
    places: tuple[slice, ...]
    """Which of the views each rank owns."""
    ranges: tuple[Range, ...]

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.views[0].device

    def held(self) -> "Held":
        """Memory for all of them."""
        buffer = self.views[0].detach().new_empty(self.length)
        pieces = [
            piece if view.dim() == 1 else piece.view(view.shape)
            for piece, view in zip(buffer.split(self.sizes), self.views, strict=True)
        ]
        return Held(buffer, pieces)


class Held(NamedTuple):
    """The memory of a pack that is under way."""

    buffer: Tensor
    pieces: list[Tensor]


class Route(NamedTuple):
    """How some tensors travel."""

    direct: tuple[Direct, ...]
    packs: tuple[Pack, ...]


def route(
    flats: Iterable[tuple[Tensor, Sequence[Span]]],
    small: Iterable[Owned],
    size: int,
    direct: int = DIRECT,
) -> Route:
    """The way of some tensors.

    Args:
        flats: tensors of one dimension, and what travels of each.
        small: tensors that are packed however long they are.
        size: of the group.
        direct: elements from which a run travels by itself.
    """
    found: list[Direct] = []
    alike: dict[tuple[torch.dtype, torch.device], list[Owned]] = {}
    left = list(small)
    for flat, spans in flats:
        rounds, rest = _rounds(spans, size, direct)
        found += [Direct(flat, ranges) for ranges in rounds]
        left += [Owned(flat[start:stop], rank) for start, stop, rank in rest]
    for one in left:
        if one.tensor.numel():
            alike.setdefault((one.tensor.dtype, one.tensor.device), []).append(one)
    return Route(tuple(found), tuple(pack for own in alike.values() for pack in _packs(own, size)))


def _rounds(
    spans: Iterable[Span], size: int, direct: int
) -> tuple[list[tuple[Range, ...]], list[Span]]:
    """One range of each rank at a time while that is worth it, the longest first; and the rest."""
    of_rank: list[list[Range]] = [[] for _ in range(size)]
    for start, stop, rank in sorted(spans):
        own = of_rank[rank]
        if own and own[-1][1] == start:
            own[-1] = (own[-1][0], stop)
        elif start < stop:
            own.append((start, stop))
    for own in of_rank:
        own.sort(key=lambda one: one[0] - one[1])
    rounds = [
        tuple(own[at] if at < len(own) else (0, 0) for own in of_rank)
        for at in range(max(map(len, of_rank)))
    ]
    long = [one for one in rounds if max(stop - start for start, stop in one) >= direct]
    if len(rounds) - len(long) <= 1:
        return rounds, []  # a message, packed or not
    rest = [
        Span(start, stop, rank)
        for one in rounds[len(long) :]
        for rank, (start, stop) in enumerate(one)
        if start < stop
    ]
    return long, rest


def _packs(alike: Sequence[Owned], size: int) -> list[Pack]:
    """Tensors in packs of a bounded size."""
    runs: list[list[Owned]] = []
    room = 0
    for one in alike:
        length = one.tensor.numel()
        if not runs or length > room:
            runs.append([])
            room = PACK
        runs[-1].append(one)
        room -= length
    return [_pack(run, size) for run in runs]


def _pack(run: Sequence[Owned], size: int) -> Pack:
    views: list[Tensor] = []
    places, ranges = [], []
    end = 0
    for rank in range(size):
        start, first = end, len(views)
        views += [one.tensor for one in run if one.rank == rank]
        end += sum(view.numel() for view in views[first:])
        places.append(slice(first, len(views)))
        ranges.append((start, end))
    sizes = tuple(view.numel() for view in views)
    return Pack(end, tuple(views), sizes, tuple(places), tuple(ranges))


def copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors to others, all at once."""
    if targets:
        with torch.no_grad():
            foreach_copy_(list(targets), list(sources))
