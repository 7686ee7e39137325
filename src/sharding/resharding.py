"""Copies of ranges between ranks that lead from one plan to another."""

from collections.abc import Iterator
from typing import NamedTuple

from sharding.ownership import Ownership

_SAME_PARAMETERS = "make both plans from the specs of one model"


class RangeCopy(NamedTuple):
    """Copy of elements of a parameter, and of every state tensor of its shape, between ranks.

    A rank stores its ranges of a parameter concatenated, in order; offsets are positions there.
    State that is one number for a whole parameter (a step count) is part of every copy.

    Example::

        >>> from sharding import ParameterSpec, plan
        >>> specs = [ParameterSpec("w", (6,))]
        >>> [copy.stays for copy in reshard(plan(specs, 2, "elements"), plan(specs, 1))]
        [True, False]
    """

    path: str
    source: int
    """The rank that has the elements."""
    source_offset: int
    target: int
    """The rank that gets the elements."""
    target_offset: int
    length: int
    start: int
    """The index of the first element in the flattened parameter."""

    @property
    def stays(self) -> bool:
        """Return True if source and target are the same rank and offset."""
        return self.source == self.target and self.source_offset == self.target_offset


def reshard(before: Ownership, after: Ownership, rank: int | None = None) -> tuple[RangeCopy, ...]:
    """Return the copies that move parameters or state from the owners of one plan to another's.

    Each element of each owner in ``after`` is written exactly once. Elements that stay on their
    rank have copies too (see :attr:`RangeCopy.stays`), so the copies can fill new buffers from old
    ones. World sizes, policies and numbers of replicas can differ. If several ranks have the
    elements, the source is the target itself if possible, and otherwise the replicas in turn. A
    parameter without elements has one copy of length 0, because its step count moves too.

    Args:
        before: the present plan.
        after: the new plan.
        rank: return only the copies that this rank sends or receives; None for all copies. One of
            4,096 ranks has a few of millions of copies, and only these are made.

    Returns:
        The copies, in the order of ``after``'s parameters.

    Raises:
        ValueError: the plans are not for the same parameters (the error names the first
            difference), or neither plan has the rank.

    Example::

        >>> from sharding import ParameterSpec, plan
        >>> specs = [ParameterSpec("a", (6,)), ParameterSpec("b", (2,))]
        >>> for copy in reshard(plan(specs, 1), plan(specs, 2, "elements")):
        ...     print(copy.path, copy.source, copy.source_offset, "->",
        ...           copy.target, copy.target_offset, copy.length)
        a 0 0 -> 0 0 4
        a 0 4 -> 1 0 2
        b 0 0 -> 1 0 2
    """
    _check_same_parameters(before, after)
    if rank is None:
        return tuple(
            _range_copy(before, after, old, new, replica)
            for new in range(len(after.pieces))
            for old in _overlapping(before, after, new)
            for replica in range(after.replicas)
        )
    most = max(before.world_size, after.world_size)
    if type(rank) is not int or not 0 <= rank < most:
        raise ValueError(f"rank must be one of 0 to {most - 1}, got {rank!r}")
    copies = [*_received(before, after, rank), *_sent(before, after, rank)]
    copies.sort(key=lambda one: (after.index_of(one.path), one.start, one.target))
    return tuple(copies)


def _received(before: Ownership, after: Ownership, rank: int) -> Iterator[RangeCopy]:
    if rank < after.world_size:
        for new in after.positions_of_rank(rank):
            for old in _overlapping(before, after, new):
                yield _range_copy(before, after, old, new, rank // after.shard_ranks)


def _sent(before: Ownership, after: Ownership, rank: int) -> Iterator[RangeCopy]:
    if rank >= before.world_size:
        return
    # _range_copy takes replicas in turn as sources.
    replicas = range(rank // before.shard_ranks, after.replicas, before.replicas)
    for old in before.positions_of_rank(rank):
        for new in _overlapping(after, before, old):
            for replica in replicas:
                one = _range_copy(before, after, old, new, replica)
                if one.source == rank != one.target:
                    yield one


def _overlapping(plan: Ownership, other: Ownership, position: int) -> range:
    """Return the positions of a plan's pieces that overlap a piece of another plan."""
    pieces = other.pieces
    index = plan.index_of(other.specs[pieces.parameter[position]].path)
    return plan.positions_between(index, pieces.start[position], pieces.stop[position])


def overlaps(before: Ownership, after: Ownership, path: str) -> Iterator[tuple[int, int]]:
    """Yield the positions, in both plans, of two pieces that overlap."""
    for new in after.positions_of(after.index_of(path)):
        for old in _overlapping(before, after, new):
            yield old, new


def _range_copy(before: Ownership, after: Ownership, old: int, new: int, replica: int) -> RangeCopy:
    ours, theirs = before.pieces, after.pieces
    start = max(ours.start[old], theirs.start[new])
    stop = min(ours.stop[old], theirs.stop[new])
    target = replica * after.shard_ranks + theirs.rank[new]
    has_elements = target < before.world_size and target % before.shard_ranks == ours.rank[old]
    source = replica % before.replicas * before.shard_ranks + ours.rank[old]
    return RangeCopy(
        after.specs[theirs.parameter[new]].path,
        target if has_elements else source,
        before.offsets[old] + start - ours.start[old],
        target,
        after.offsets[new] + start - theirs.start[new],
        stop - start,
        start,
    )


def _check_same_parameters(before: Ownership, after: Ownership) -> None:
    theirs = {spec.path: spec for spec in before.specs}
    for spec in after.specs:
        if spec.path not in theirs:
            raise ValueError(
                f"the plan to come from has no parameter {spec.path!r}; {_SAME_PARAMETERS}"
            )
        other = theirs.pop(spec.path)
        if (spec.shape, spec.dtype) != (other.shape, other.dtype):
            raise ValueError(
                f"{spec.path!r} has shape {other.shape} and {other.dtype} in the plan to come "
                f"from, {spec.shape} and {spec.dtype} in the other; {_SAME_PARAMETERS}"
            )
    if theirs:
        raise ValueError(
            f"the plan to go to has no parameter {next(iter(theirs))!r}; {_SAME_PARAMETERS}"
        )
