"""Transfer of elements between ranks: long contiguous runs directly, short ones coalesced.

A message costs about as much as copying some hundred kilobytes. Whichever way elements go, it is
found out once for the tensors that it moves, and used at every step: gathers of parameters go from
the owners, reductions of gradients to them.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim._torch import foreach_copy_
from sharding.transport import Range

DIRECT = 1 << 16
"""Elements from which a contiguous run is worth a message of its own."""
MOST = 1 << 20
"""Elements that are coalesced into one message, unless one run alone has more."""


class OwnedSpan(NamedTuple):
    """Elements of a flat tensor, and who owns them."""

    start: int
    stop: int
    rank: int


class Owned(NamedTuple):
    """A tensor that one rank owns all of."""

    tensor: Tensor
    rank: int


class Direct(NamedTuple):
    """Contiguous runs that go as they lie, one of each rank."""

    flat: Tensor
    ranges: tuple[Range, ...]


class Coalesced(NamedTuple):
    """Short runs that go in one message, side by side in the order of their owners."""

    views: tuple[Tensor, ...]
    """Where they come from and go to."""
    places: tuple[slice, ...]
    """Which of the views each rank owns."""
    ranges: tuple[Range, ...]
    lengths: tuple[int, ...]
    """How many elements each view has."""

    @property
    def device(self) -> torch.device:
        """Device of the elements."""
        return self.views[0].device

    @property
    def length(self) -> int:
        """Elements of all of them."""
        return self.ranges[-1][1]

    def staging(self) -> tuple[Tensor, list[Tensor]]:
        """A buffer for all of them, and the place in it of each."""
        buffer = self.views[0].detach().new_empty(self.length)
        pieces = zip(buffer.split(list(self.lengths)), self.views, strict=True)
        return buffer, [one if view.dim() == 1 else one.view(view.shape) for one, view in pieces]


class Coalescing(NamedTuple):
    """The messages in which some tensors travel."""

    direct: tuple[Direct, ...]
    coalesced: tuple[Coalesced, ...]


def planned(
    flats: Iterable[tuple[Tensor, Sequence[OwnedSpan]]], small: Iterable[Owned], size: int
) -> Coalescing:
    """The messages for some tensors.

    Args:
        flats: tensors of one dimension, and what travels of each.
        small: tensors that are coalesced however long they are.
        size: of the group; what one rank alone owns does not travel.
    """
    if size == 1:
        return Coalescing((), ())
    direct: list[Direct] = []
    alike: dict[tuple[torch.dtype, torch.device], list[Owned]] = {}
    left = list(small)
    for flat, spans in flats:
        rounds, rest = _rounds(spans, size)
        direct += [Direct(flat, ranges) for ranges in rounds]
        left += [Owned(flat[start:stop], rank) for start, stop, rank in rest]
    for one in left:
        if one.tensor.numel():
            alike.setdefault((one.tensor.dtype, one.tensor.device), []).append(one)
    return Coalescing(
        tuple(direct),
        tuple(_coalesced(part, size) for own in alike.values() for part in _bounded(own)),
    )


def _rounds(
    spans: Iterable[OwnedSpan], size: int
) -> tuple[list[tuple[Range, ...]], list[OwnedSpan]]:
    """Return rounds of one run per rank while that pays, the longest first; and the rest."""
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
    long = [one for one in rounds if max(stop - start for start, stop in one) >= DIRECT]
    if len(rounds) - len(long) <= 1:
        return rounds, []  # a message, coalesced or not
    rest = [
        OwnedSpan(start, stop, rank)
        for one in rounds[len(long) :]
        for rank, (start, stop) in enumerate(one)
        if start < stop
    ]
    return long, rest


def _bounded(alike: Sequence[Owned]) -> list[list[Owned]]:
    """Tensors by the message that they go in."""
    found: list[list[Owned]] = []
    room = 0
    for one in alike:
        length = one.tensor.numel()
        if not found or length > room:
            found.append([])
            room = MOST
        found[-1].append(one)
        room -= length
    return found


def _coalesced(parts: Sequence[Owned], size: int) -> Coalesced:
    views: list[Tensor] = []
    places, ranges = [], []
    end = 0
    for rank in range(size):
        start, first = end, len(views)
        views += [one.tensor for one in parts if one.rank == rank]
        end += sum(view.numel() for view in views[first:])
        places.append(slice(first, len(views)))
        ranges.append((start, end))
    lengths = tuple(view.numel() for view in views)
    return Coalesced(tuple(views), tuple(places), tuple(ranges), lengths)


def copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors to others, all at once."""
    if targets:
        with torch.no_grad():
            foreach_copy_(list(targets), list(sources))
