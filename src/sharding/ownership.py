"""Owners of elements: the columns of a plan, and what is read from them."""

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
        for place in self._places_of_rank[self.shard_rank(rank)]:
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
        pieces, step = self.pieces, self.shard_ranks
        return tuple(
            Owner(
                tuple(range(pieces.rank[place], self.world_size, step)),
                pieces.start[place],
                pieces.stop[place],
            )
            for place in self.places_of(index)
        )

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
    def _places_of_rank(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in range(self.shard_ranks)]
        for place, rank in enumerate(self.pieces.rank):
            found[rank].append(place)
        return found
