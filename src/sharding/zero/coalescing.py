"""Transfer of elements between ranks: long contiguous runs directly, short ones coalesced.

A message costs about as much as copying some hundred kilobytes. Whichever way elements go, it is
found out once for the tensors that it moves, and used at every step: gathers of parameters go from
the owners, reductions of gradients to them.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
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
    shaped: tuple[int, ...]
    """The positions of views that do not have one dimension, since they are not contiguous."""

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
        pieces = list(buffer.split(list(self.lengths)))
        for place in self.shaped:
            pieces[place] = pieces[place].view(self.views[place].shape)
        return buffer, pieces


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
    of_rank: dict[int, list[Range]] = {}
    for start, stop, rank in sorted(spans):
        own = of_rank.setdefault(rank, [])
        if own and own[-1][1] == start:
            own[-1] = (own[-1][0], stop)
        elif start < stop:
            own.append((start, stop))
    for own in of_rank.values():
        own.sort(key=lambda one: one[0] - one[1])
    every = max(map(len, of_rank.values()), default=0)
    long = max((sum(b - a >= DIRECT for a, b in own) for own in of_rank.values()), default=0)
    direct = every if every - long <= 1 else long  # a message, coalesced or not
    rounds = [[(0, 0)] * size for _ in range(direct)]
    rest: list[tuple[int, OwnedSpan]] = []
    for rank, own in sorted(of_rank.items()):
        for at, (start, stop) in enumerate(own):
            if at < direct:
                rounds[at][rank] = (start, stop)
            else:
                rest.append((at, OwnedSpan(start, stop, rank)))
    rest.sort(key=lambda one: one[0])  # by round, and in each by rank
    return list(map(tuple, rounds)), [span for _, span in rest]


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
    ordered = sorted(parts, key=lambda one: one.rank)  # stable: of one rank, in the order given
    views = [_flat(one.tensor) for one in ordered]
    lengths = [view.numel() for view in views]
    counts, elements = [0] * size, [0] * size
    for one, length in zip(ordered, lengths, strict=True):
        counts[one.rank] += 1
        elements[one.rank] += length
    places = tuple(slice(start, stop) for start, stop in _side_by_side(counts))
    ranges = _side_by_side(elements)
    shaped = tuple(place for place, view in enumerate(views) if view.dim() != 1)
    return Coalesced(tuple(views), places, ranges, tuple(lengths), shaped)


def _side_by_side(counts: Sequence[int]) -> tuple[Range, ...]:
    """Return the range of each rank, one after the other."""
    pairs = zip(accumulate(counts), counts, strict=True)
    return tuple((stop - count, stop) for stop, count in pairs)


def _flat(tensor: Tensor) -> Tensor:
    """Return a tensor in one dimension, where its elements lie so; else the tensor."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor


def copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors to others, all at once."""
    if targets:
        with torch.no_grad():
            foreach_copy_(list(targets), list(sources))
