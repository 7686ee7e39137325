"""From one plan to another: which ranges have to be copied from which rank to which."""

from typing import TYPE_CHECKING, NamedTuple

from sharding.overlay import Both, local_ranges, overlaid

if TYPE_CHECKING:
    from sharding.shard_plan import ShardPlan


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


def reshard(before: "ShardPlan", after: "ShardPlan") -> tuple[RangeCopy, ...]:
    """The copies that bring parameters, or state, from the owners of one plan to those of another.

    Each element of each owner in ``after`` is written exactly once; what an owner keeps is in the
    list too (see :attr:`RangeCopy.stays`), so that it can be run from old buffers to new ones.
    World sizes, policies and numbers of replicas may differ. Where several ranks have the
    elements, the target itself is taken if it is one of them, and otherwise the replicas in turn.
    A parameter without elements has one copy of length 0: its step count moves too.

    Args:
        before: the plan by which elements are held now.
        after: the plan by which they are to be held.

    Returns:
        The copies, in the order of ``after``'s parameters.

    Raises:
        ValueError: the plans are not for the same parameters; names the first difference.

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
    copies: list[RangeCopy] = []
    for index, spec in enumerate(after.specs):
        old = local_ranges(before, before.index_of(spec.path))
        for both in overlaid(old, local_ranges(after, index)):
            copies += [
                _copy(before, after, spec.path, both, replica) for replica in range(after.replicas)
            ]
    return tuple(copies)


def _copy(
    before: "ShardPlan", after: "ShardPlan", path: str, both: Both, replica: int
) -> RangeCopy:
    target = replica * after.shard_ranks + both.after.rank
    has_it = target < before.world_size and target % before.shard_ranks == both.before.rank
    source = replica % before.replicas * before.shard_ranks + both.before.rank
    return RangeCopy(
        path,
        target if has_it else source,
        both.before.offset + both.start - both.before.start,
        target,
        both.after.offset + both.start - both.after.start,
        both.stop - both.start,
        both.start,
    )


def _check(before: "ShardPlan", after: "ShardPlan") -> None:
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
