"""Transfer of elements between ranks: long contiguous runs directly, short ones coalesced.

A message costs about as much as copying a few hundred kilobytes. The messages are planned once for
the same tensors, and used in every step: to gather parameters from their owners, and to reduce
gradients to the owners.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim._torch.operators import foreach_copy_
from sharding.ownership import Owner
from sharding.transport import Range, Transport

DIRECT = 1 << 16
"""Number of elements from which a contiguous run is sent as a separate message."""
MAX_COALESCED = 1 << 20
"""Maximum number of elements in a coalesced message, unless one run alone has more."""


OwnedTensor = tuple[Tensor, int]
"""Tensor that one rank owns as a whole, and the rank."""


class ElementMessage(NamedTuple):
    """Runs of elements that one collective transfers, ordered by owner."""

    views: tuple[Tensor, ...]
    """The runs, as views of the tensors; of a direct message, one flat tensor with all runs."""
    ranges: tuple[Range, ...]
    """The elements of each rank: of the flat tensor, or of the buffer for the runs."""
    places: tuple[slice, ...] = ()
    """For each rank, the indices of the views that it owns. Empty for a direct message, whose runs
    are sent without a copy, at most one for each rank."""
    lengths: tuple[int, ...] = ()
    """The number of elements of each view."""
    shaped: tuple[int, ...] = ()
    """The indices of the views that are not flat, since their tensor is not contiguous."""

    @property
    def device(self) -> torch.device:
        return self.views[0].device

    def gather(self, transport: Transport) -> Callable[[], object]:
        """Start to send runs from their owners to all ranks; return a function that waits."""
        if not self.places:
            return transport.all_gather(self.views[0], self.ranges).wait
        (buffer, parts), own = self.allocate_buffer(), self.places[transport.rank]
        copy(parts[own], self.views[own])
        work = transport.all_gather(buffer, self.ranges)

        def wait() -> None:
            work.wait()
            for others in (slice(own.start), slice(own.stop, None)):
                copy(self.views[others], parts[others])

        return wait

    def reduce(self, transport: Transport) -> Callable[[], object]:
        """Start to average runs over all ranks at their owners; return a function that waits."""
        if not self.places:
            return transport.reduce_scatter(self.views[0], self.ranges, average=True).wait
        (buffer, parts), own = self.allocate_buffer(), self.places[transport.rank]
        copy(parts, self.views)
        work = transport.reduce_scatter(buffer, self.ranges, average=True)

        def wait() -> None:
            work.wait()
            copy(self.views[own], parts[own])

        return wait

    def allocate_buffer(self) -> tuple[Tensor, list[Tensor]]:
        """Return a buffer for the message, and the part of it for each view."""
        buffer = self.views[0].detach().new_empty(self.ranges[-1][1])
        pieces = list(buffer.split(list(self.lengths)))
        for place in self.shaped:
            pieces[place] = pieces[place].view(self.views[place].shape)
        return buffer, pieces


def plan_messages(
    flats: Iterable[tuple[Tensor, Sequence[Owner]]], small: Iterable[OwnedTensor], size: int
) -> tuple[ElementMessage, ...]:
    """Return the messages that transfer some tensors, direct ones first.

    Args:
        flats: flat tensors, and the owners of the ranges that are transferred. In a plan with
            replicas, the owner of a range is the rank of the first replica.
        small: tensors that are coalesced, whatever their size.
        size: of the group. A single rank needs no messages.
    """
    if size == 1:
        return ()
    direct: list[ElementMessage] = []
    alike: dict[tuple[torch.dtype, torch.device], list[OwnedTensor]] = {}
    left = list(small)
    for flat, owners in flats:
        rounds, rest = _plan_rounds(owners, size)
        direct += [ElementMessage((flat,), ranges) for ranges in rounds]
        left += [(flat[start:stop], rank) for rank, (start, stop) in rest]
    for tensor, rank in left:
        if tensor.numel():
            alike.setdefault((tensor.dtype, tensor.device), []).append((tensor, rank))
    parts = (part for own in alike.values() for part in _split_by_size(own))
    return (*direct, *(_coalesce(part, size) for part in parts))


def _plan_rounds(
    owners: Iterable[Owner], size: int
) -> tuple[list[tuple[Range, ...]], list[tuple[int, Range]]]:
    """Return rounds of one run per rank, longest first, and the remaining runs with their ranks."""
    of_rank: dict[int, list[Range]] = {}
    for (rank, *_), start, stop in sorted(owners, key=lambda one: one.start):
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
    rest: list[tuple[int, int, Range]] = []
    for rank, own in sorted(of_rank.items()):
        for at, run in enumerate(own):
            if at < direct:
                rounds[at][rank] = run
            else:
                rest.append((at, rank, run))
    rest.sort()  # by round, and in each by rank
    return list(map(tuple, rounds)), [(rank, run) for _, rank, run in rest]


def _split_by_size(alike: Sequence[OwnedTensor]) -> list[list[OwnedTensor]]:
    """Divide tensors into lists of at most MAX_COALESCED elements."""
    found: list[list[OwnedTensor]] = []
    room = 0
    for tensor, rank in alike:
        length = tensor.numel()
        if not found or length > room:
            found.append([])
            room = MAX_COALESCED
        found[-1].append((tensor, rank))
        room -= length
    return found


def _coalesce(parts: Sequence[OwnedTensor], size: int) -> ElementMessage:
    ordered = sorted(parts, key=lambda one: one[1])  # stable: of one rank, in the order given
    views = [_flat(tensor) for tensor, _ in ordered]
    lengths = [view.numel() for view in views]
    counts, elements = [0] * size, [0] * size
    for (_, rank), length in zip(ordered, lengths, strict=True):
        counts[rank] += 1
        elements[rank] += length
    places = tuple(slice(start, stop) for start, stop in _consecutive_ranges(counts))
    ranges = _consecutive_ranges(elements)
    shaped = tuple(place for place, view in enumerate(views) if view.dim() != 1)
    return ElementMessage(tuple(views), ranges, places, tuple(lengths), shaped)


def _consecutive_ranges(counts: Sequence[int]) -> tuple[Range, ...]:
    """Return the range of each rank, if ranges of these lengths follow each other."""
    pairs = zip(accumulate(counts), counts, strict=True)
    return tuple((stop - count, stop) for stop, count in pairs)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.view(-1) if tensor.is_contiguous() else tensor


def copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, in one call."""
    if targets:
        with torch.no_grad():
            foreach_copy_(list(targets), list(sources))
