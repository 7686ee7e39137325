"""From one plan to another: which ranges have to be copied from which rank to which."""

from collections.abc import Iterator
from typing import NamedTuple

from sharding.ownership import Ownership


class RangeCopy(NamedTuple):
    """Elements of a parameter, and of every state tensor of its shape, to be copied.

    A rank holds its ranges of a parameter end to end, in order; offsets count from there. State
    that is one number for a whole parameter (a step count) goes with every copy.

    Example::

        >>> from sharding import ParameterSpec, plan
        >>> specs = [ParameterSpec("w", (6,))]
        >>> [copy.stays for copy in reshard(plan(specs, 2, "elements"), plan(specs, 1))]
        [True, False]
    """

    path: str
    source: int
    """The rank that has them."""
    source_offset: int
    target: int
    """The rank that gets them."""
    target_offset: int
    length: int
    start: int
    """The first of them, counted in the parameter."""

    @property
    def stays(self) -> bool:
        """Return True if the elements are already where they have to be."""
        return self.source == self.target and self.source_offset == self.target_offset


def reshard(before: Ownership, after: Ownership, rank: int | None = None) -> tuple[RangeCopy, ...]:
    """The copies that bring parameters, or state, from the owners of one plan to those of another.

    Each element of each owner in ``after`` is written exactly once; what an owner keeps is in the
    list too (see :attr:`RangeCopy.stays`), so that it can be run from old buffers to new ones.
    World sizes, policies and numbers of replicas may differ. Where several ranks have the
    elements, the target itself is taken if it is one of them, and otherwise the replicas in turn.
    A parameter without elements has one copy of length 0: its step count moves too.

    Args:
        before: the plan by which elements are held now.
        after: the plan by which they are to be held.
        rank: only the copies that this rank sends or receives. Other copies are not made: a rank of
            4,096 has a few of millions. None for all.

    Returns:
        The copies, in the order of ``after``'s parameters.

    Raises:
        ValueError: the plans are not for the same parameters; names the first difference. A rank
            that neither plan has.

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
    _check(before, after)
    if rank is None:
        return tuple(
            _copy(before, after, old, new, replica)
            for new in range(len(after.pieces))
            for old in _sources(before, after, new)
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
        for new in after.places_of_rank(rank):
            for old in _sources(before, after, new):
                yield _copy(before, after, old, new, rank // after.shard_ranks)


def _sent(before: Ownership, after: Ownership, rank: int) -> Iterator[RangeCopy]:
    """The copies to other ranks."""
    if rank >= before.world_size:
        return
    # Replicas send in turn: see _copy.
    replicas = range(rank // before.shard_ranks, after.replicas, before.replicas)
    for old in before.places_of_rank(rank):
        for new in _sources(after, before, old):
            for replica in replicas:
                one = _copy(before, after, old, new, replica)
                if one.source == rank != one.target:
                    yield one


def _sources(plan: Ownership, other: Ownership, place: int) -> range:
    """Return the pieces of a plan that have elements of a piece of another plan."""
    pieces = other.pieces
    index = plan.index_of(other.specs[pieces.parameter[place]].path)
    return plan.places_between(index, pieces.start[place], pieces.stop[place])


def overlaps(before: Ownership, after: Ownership, path: str) -> Iterator[tuple[int, int]]:
    """Return the positions, in both plans, of each two pieces that share elements."""
    for new in after.places_of(after.index_of(path)):
        for old in _sources(before, after, new):
            yield old, new


def _copy(before: Ownership, after: Ownership, old: int, new: int, replica: int) -> RangeCopy:
    ours, theirs = before.pieces, after.pieces
    start = max(ours.start[old], theirs.start[new])
    stop = min(ours.stop[old], theirs.stop[new])
    target = replica * after.shard_ranks + theirs.rank[new]
    has_it = target < before.world_size and target % before.shard_ranks == ours.rank[old]
    source = replica % before.replicas * before.shard_ranks + ours.rank[old]
    return RangeCopy(
        after.specs[theirs.parameter[new]].path,
        target if has_it else source,
        before.offsets[old] + start - ours.start[old],
        target,
        after.offsets[new] + start - theirs.start[new],
        stop - start,
        start,
    )


def _check(before: Ownership, after: Ownership) -> None:
    theirs = {spec.path: spec for spec in before.specs}
    for spec in after.specs:
        if spec.path not in theirs:
            raise ValueError(f"the plan to come from has no parameter {spec.path!r}")
        other = theirs.pop(spec.path)
        if (spec.shape, spec.dtype) != (other.shape, other.dtype):
            raise ValueError(
                f"{spec.path!r} has shape {other.shape} and {other.dtype} in the plan to come "
                f"from, {spec.shape} and {spec.dtype} in the other"
            )
    if theirs:
        raise ValueError(f"the plan to go to has no parameter {next(iter(theirs))!r}")
