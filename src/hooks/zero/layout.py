"""Which elements of a DDP bucket belong to which rank, and in what portions they travel.

A plan says who owns which elements of each parameter; a bucket holds the gradients of some
parameters, one after the other. Large pieces travel from where they lie; small ones are packed,
since a message costs about as much as copying some hundred kilobytes.
"""

from collections.abc import Sequence
from typing import NamedTuple

from sharding import ShardPlan
from sharding.transport import Range

DIRECT = 1 << 16
"""Elements from which a piece is worth a message of its own."""


class Part(NamedTuple):
    """Elements [start, stop) of one parameter of a bucket, laid flat, and the rank that owns them.

    Where a plan has replicas, that is the owner in the first of them.
    """

    member: int
    """The place of the parameter in the bucket."""
    start: int
    stop: int
    rank: int

    @property
    def numel(self) -> int:
        """How many elements."""
        return self.stop - self.start


class Member(NamedTuple):
    """A parameter of a bucket, as far as portions depend on it."""

    path: str
    numel: int
    offset: int
    """Where its gradient begins, in elements of the bucket's buffer."""
    factor: int = 1
    """Elements of the buffer for each of its own: 2 for a complex one that is kept as real."""
    flat: bool = True
    """Whether the elements of the parameter, and of its gradient, lie in the order of its shape."""
    dense: bool = True
    """Whether they fill their memory, in whatever order, which is the same for both."""


class Portions(NamedTuple):
    """How some parts travel: in rounds of one range per rank, and the small ones together."""

    rounds: tuple[tuple[Range, ...], ...]
    """For each round, the range of each rank in a flat buffer; (0, 0) where it has none."""
    packed: tuple[Part, ...]
    """Those that are packed, by rank."""


class Layout(NamedTuple):
    """Whose the elements of a bucket are, and how they travel."""

    parts: tuple[Part, ...]
    reduction: Portions
    gathering: dict[int, tuple[tuple[Range, ...], ...]]
    """By place in the bucket, for a parameter that travels by itself, ranges of its memory."""
    packed: tuple[Part, ...]
    """Parts of the other parameters, by rank."""


class Layouts:
    """The layouts of all buckets that have come so far; each is made once.

    Args:
        plan: who owns what.
        ranks: the size of the group.
        direct: elements from which a piece travels by itself.
    """

    def __init__(self, plan: ShardPlan, ranks: int, direct: int = DIRECT) -> None:
        self.plan = plan
        self._ranks = ranks
        self._direct = direct
        self._known: dict[tuple[Member, ...], Layout] = {}

    def of(self, members: tuple[Member, ...]) -> Layout:
        """The layout of a bucket with these parameters."""
        found = self._known.get(members)
        if found is None:
            parts = parts_of(self.plan, members)
            alone, packed = gathering(members, parts, self._ranks, self._direct)
            found = Layout(
                parts, reduction(members, parts, self._ranks, self._direct), alone, packed
            )
            self._known[members] = found
        return found


def parts_of(plan: ShardPlan, members: Sequence[Member]) -> tuple[Part, ...]:
    """Who owns the elements of a bucket, in its order."""
    return tuple(
        Part(place, owner.start, owner.stop, owner.ranks[0])
        for place, member in enumerate(members)
        for owner in plan.owners(member.path)
    )


def reduction(
    members: Sequence[Member], parts: Sequence[Part], ranks: int, direct: int
) -> Portions:
    """How the gradients of a bucket come to their owners: rounds are ranges of its buffer.

    Args:
        members: the parameters of the bucket.
        parts: all of them, in the bucket's order.
        ranks: the size of the group.
        direct: elements from which a piece travels by itself.
    """
    runs: list[_Run] = []
    scattered: list[Part] = []
    for part in parts:
        member = members[part.member]
        if not part.numel:
            continue
        # Where elements lie in another order than they are numbered, only the whole is a range.
        if not member.flat and part.numel != member.numel:
            scattered.append(part)
            continue
        start = member.offset + member.factor * part.start
        run = _Run(part.rank, start, start + member.factor * part.numel, (part,))
        if runs and (runs[-1].rank, runs[-1].stop) == (run.rank, run.start):
            last = runs.pop()
            run = _Run(run.rank, last.start, run.stop, last.parts + run.parts)
        runs.append(run)
    return _portions(runs, scattered, ranks, direct)


def gathering(
    members: Sequence[Member], parts: Sequence[Part], ranks: int, direct: int
) -> tuple[dict[int, tuple[tuple[Range, ...], ...]], tuple[Part, ...]]:
    """How the parameters of a bucket come from their owners.

    Returns:
        By place in the bucket, for each that travels by itself, rounds of ranges of its memory
        laid flat; and the parts of the others, by rank.
    """
    alone: dict[int, tuple[tuple[Range, ...], ...]] = {}
    packed: list[Part] = []
    for place, member in enumerate(members):
        own = [part for part in parts if part.member == place and part.numel]
        movable = member.flat or (member.dense and len(own) == 1)
        if own and movable and member.numel >= direct:
            runs = [_Run(part.rank, part.start, part.stop, (part,)) for part in own]
            alone[place] = tuple(_rows(runs, ranks))
        else:
            packed += own
    return alone, _by_rank(packed)


class _Run(NamedTuple):
    """Neighbouring parts of one rank, as a range of a buffer."""

    rank: int
    start: int
    stop: int
    parts: tuple[Part, ...]


def _portions(runs: Sequence[_Run], scattered: Sequence[Part], ranks: int, direct: int) -> Portions:
    """Rounds while they are worth it; what is left is packed."""
    rows = _rows(runs, ranks)
    large = [row for row in rows if max(stop - start for start, stop in row) >= direct]
    small = rows[len(large) :]  # the largest pieces come first
    if len(small) == 1 and not scattered:
        large, small = rows, []
    moved = {span for row in large for span in row}
    left = [part for run in runs if (run.start, run.stop) not in moved for part in run.parts]
    return Portions(tuple(large), _by_rank([*left, *scattered]))


def _rows(runs: Sequence[_Run], ranks: int) -> list[tuple[Range, ...]]:
    """One range of each rank at a time, the largest first."""
    of_rank: list[list[Range]] = [[] for _ in range(ranks)]
    for run in sorted(runs, key=lambda run: run.start - run.stop):
        of_rank[run.rank].append((run.start, run.stop))
    rounds = max((len(ranges) for ranges in of_rank), default=0)
    return [
        tuple(ranges[at] if at < len(ranges) else (0, 0) for ranges in of_rank)
        for at in range(rounds)
    ]


def _by_rank(parts: Sequence[Part]) -> tuple[Part, ...]:
    return tuple(sorted(parts, key=lambda part: part.rank))
