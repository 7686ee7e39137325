"""Owners of elements: the columns of a plan, and what is read from them."""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from sharding.pieces import Pieces, checked
from sharding.problem import checked_int, checked_ranks
from sharding.spec import Specs, check_specs


class OwnedRange(NamedTuple):
    """Elements [start, stop) of one parameter, flattened, that a rank owns.

    Example::

        >>> from sharding import ParameterSpec, plan
        >>> plan([ParameterSpec("w", (2, 3))], 2, "elements").owned(1)[0]
        OwnedRange(parameter=0, path='w', start=3, stop=6, whole=False)
    """

    parameter: int
    """Its place among the specs."""
    path: str
    start: int
    stop: int
    whole: bool
    """Whether that is all of the parameter."""


class Owner(NamedTuple):
    """Owner of elements [start, stop) of a parameter.

    Example::

        >>> from sharding import ParameterSpec, plan
        >>> plan([ParameterSpec("w", (2, 3))], 4, "hierarchical", node_size=2).owners("w")[0]
        Owner(ranks=(0, 2), start=0, stop=6)
    """

    ranks: tuple[int, ...]
    """One rank for each replica."""
    start: int
    stop: int


@dataclass(frozen=True)
class Ownership:
    """Columns of a :class:`~sharding.ShardPlan`.

    Args:
        world_size: the number of ranks.
        specs: the parameters.
        pieces: who owns what, among the ranks of one replica.
        policy: the name of the policy that made it.
        replicas: how many groups of ranks each own everything.

    Raises:
        TypeError, ValueError: as for a plan.

    Example::

        >>> from sharding import ParameterSpec
        >>> from sharding.pieces import Pieces
        >>> Ownership(1, (ParameterSpec("w", (3,)),), Pieces((0,), (0,), (3,), (0,))).owners("w")
        (Owner(ranks=(0,), start=0, stop=3),)
    """

    world_size: int
    specs: Specs
    pieces: Pieces
    policy: str = "custom"
    replicas: int = 1

    def __post_init__(self) -> None:
        """Check that everything has exactly one owner."""
        checked_ranks(self.world_size)
        checked_int("replicas", self.replicas, 1)
        if self.world_size % self.replicas:
            raise ValueError(
                f"replicas must divide world_size, {self.world_size}, got {self.replicas}"
            )
        object.__setattr__(self, "specs", tuple(self.specs))
        check_specs(self.specs)
        object.__setattr__(self, "pieces", checked(self.pieces, self.specs, self.shard_ranks))

    @property
    def shard_ranks(self) -> int:
        """The number of ranks that share one copy of everything."""
        return self.world_size // self.replicas

    def shard_rank(self, rank: int) -> int:
        """The place of a rank within its replica.

        Raises:
            ValueError: a rank that does not exist.
        """
        if type(rank) is not int or not 0 <= rank < self.world_size:
            raise ValueError(f"rank must be one of 0 to {self.world_size - 1}, got {rank!r}")
        return rank % self.shard_ranks

    @property
    def is_whole(self) -> bool:
        """Return True if no parameter is cut."""
        return len(self.pieces) == len(self.specs)

    def owned(self, rank: int) -> tuple[OwnedRange, ...]:
        """Return the ranges that a rank owns, in the order of the specs.

        Raises:
            ValueError: a rank that does not exist.
        """
        pieces, numels = self.pieces, self._numels
        found = []
        for place in self.places_of_rank(rank):
            index, start, stop = pieces.parameter[place], pieces.start[place], pieces.stop[place]
            whole = stop - start == numels[index]
            found.append(OwnedRange(index, self.specs[index].path, start, stop, whole))
        return tuple(found)

    def owners(self, path: str) -> tuple[Owner, ...]:
        """Return the owners of a parameter, range by range.

        Raises:
            ValueError: a path that the plan does not have.
        """
        index = self.index_of(path)
        pieces = self.pieces
        return tuple(
            Owner(self.ranks_of(place), pieces.start[place], pieces.stop[place])
            for place in self.places_of(index)
        )

    def ranks_of(self, place: int) -> tuple[int, ...]:
        """Return the ranks that own a piece: one for each replica."""
        return tuple(range(self.pieces.rank[place], self.world_size, self.shard_ranks))

    def index_of(self, path: str) -> int:
        """The place of a parameter among the specs.

        Raises:
            ValueError: a path that the plan does not have.
        """
        if path not in self._index:
            raise ValueError(f"this plan has no parameter {path!r}")
        return self._index[path]

    def places_of(self, index: int) -> range:
        """Return the positions of a parameter's pieces in the columns."""
        if self.is_whole:
            return range(index, index + 1)
        return range(self._first_places[index], self._first_places[index + 1])

    @cached_property
    def _numels(self) -> tuple[int, ...]:
        return tuple(spec.numel for spec in self.specs)

    @cached_property
    def _index(self) -> dict[str, int]:
        return {spec.path: index for index, spec in enumerate(self.specs)}

    @cached_property
    def _first_places(self) -> list[int]:
        found: list[int] = []
        for place, index in enumerate(self.pieces.parameter):
            if index == len(found):
                found.append(place)
        return [*found, len(self.pieces)]

    @cached_property
    def offsets(self) -> list[int]:
        """For each piece, where it begins in what its rank has of the parameter, end to end."""
        if self.is_whole:
            return [0] * len(self.pieces)
        pieces, found = self.pieces, list[int]()
        held, current = dict[int, int](), -1
        for index, start, stop, rank in pieces.rows():
            if index != current:
                held, current = {}, index
            found.append(held.get(rank, 0))
            held[rank] = found[-1] + stop - start
        return found

    def places_between(self, index: int, start: int, stop: int) -> range:
        """Return the positions of those pieces of a parameter that have elements of a range.

        An empty parameter has one empty piece, which every range of it has.
        """
        places = self.places_of(index)
        if len(places) == 1:
            return places
        first = bisect_right(self.pieces.start, start, places.start, places.stop) - 1
        return range(first, bisect_left(self.pieces.start, stop, first, places.stop))

    def places_of_rank(self, rank: int) -> list[int]:
        """Return the positions of the pieces of a rank.

        Raises:
            ValueError: a rank that does not exist.
        """
        return self._places_of_rank[self.shard_rank(rank)]

    @cached_property
    def _places_of_rank(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in range(self.shard_ranks)]
        for place, rank in enumerate(self.pieces.rank):
            found[rank].append(place)
        return found
