"""The pieces that two plans make of one parameter, laid over one another."""

from collections.abc import Iterator
from typing import NamedTuple

from sharding.ownership import Ownership


class Local(NamedTuple):
    """A range of a parameter at its owner."""

    start: int
    stop: int
    rank: int
    """Within a replica."""
    offset: int
    """Where the range begins in what its owner has of the parameter, ranges end to end."""


class Both(NamedTuple):
    """A range of elements that one rank has by one plan, and one rank by the other."""

    start: int
    stop: int
    before: Local
    after: Local


def local_ranges(plan: Ownership, index: int) -> list[Local]:
    """The ranges of a parameter, in order."""
    pieces, held = plan.pieces, dict[int, int]()
    found = []
    for place in plan.places_of(index):
        start, stop, rank = pieces.start[place], pieces.stop[place], pieces.rank[place]
        offset = held.get(rank, 0)
        found.append(Local(start, stop, rank, offset))
        held[rank] = offset + stop - start
    return found


def overlaid(before: list[Local], after: list[Local]) -> Iterator[Both]:
    """The common refinement of two lists of ranges that cover the same elements."""
    ours, theirs = iter(before), iter(after)
    left, right = next(ours), next(theirs)
    start = 0
    while True:
        stop = min(left.stop, right.stop)
        yield Both(start, stop, left, right)
        start = stop
        if stop == before[-1].stop:
            return
        left_ends, right_ends = left.stop == stop, right.stop == stop
        left = next(ours) if left_ends else left
        right = next(theirs) if right_ends else right
