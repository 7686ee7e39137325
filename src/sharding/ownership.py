"""Owners of the elements of parameters, lookups by rank and parameter, and views of a rank."""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from functional_optim.engine.messages import format_names
from sharding.pieces import Pieces, sort_and_check
from sharding.problem import check_int, check_world_size
from sharding.spec import Specs, check_specs


class OwnedRange(NamedTuple):
    """Elements [start, stop) of a flattened parameter that a rank owns.

    Example::

        >>> from sharding import ParameterSpec, plan
        >>> plan([ParameterSpec("w", (2, 3))], 2, "elements").owned(1)[0]
        OwnedRange(parameter=0, path='w', start=3, stop=6, whole=False)
    """

    parameter: int
    """The index of the parameter among the specs."""
    path: str
    start: int
    stop: int
    whole: bool
    """True if the range is the whole parameter."""


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
    """Base class of :class:`~sharding.ShardPlan`: its fields, checks and lookups."""

    world_size: int
    specs: Specs
    pieces: Pieces
    policy: str = "custom"
    replicas: int = 1

    def __post_init__(self) -> None:
        """Check that every element has exactly one owner."""
        check_world_size(self.world_size)
        check_int("replicas", self.replicas, 1)
        if self.world_size % self.replicas:
            raise ValueError(
                f"replicas must divide world_size, {self.world_size}, got {self.replicas}"
            )
        object.__setattr__(self, "specs", tuple(self.specs))
        check_specs(self.specs)
        pieces = sort_and_check(self.pieces, self.specs, self.shard_ranks)
        object.__setattr__(self, "pieces", pieces)

    @property
    def shard_ranks(self) -> int:
        """The number of ranks of one replica."""
        return self.world_size // self.replicas

    def shard_rank(self, rank: int) -> int:
        """Return the index of a rank within its replica."""
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
            ValueError: the rank does not exist.
        """
        pieces, found = self.pieces, []
        for position in self.positions_of_rank(rank):
            index = pieces.parameter[position]
            start, stop = pieces.start[position], pieces.stop[position]
            spec = self.specs[index]
            found.append(OwnedRange(index, spec.path, start, stop, stop - start == spec.numel))
        return tuple(found)

    def owners(self, path: str) -> tuple[Owner, ...]:
        """Return the owners of a parameter, range by range.

        Raises:
            ValueError: the plan does not have the path.
        """
        index = self.index_of(path)
        pieces = self.pieces
        return tuple(
            Owner(self.ranks_of(position), pieces.start[position], pieces.stop[position])
            for position in self.positions_of(index)
        )

    def ranks_of(self, position: int) -> tuple[int, ...]:
        """Return the ranks that own a piece: one for each replica."""
        return tuple(range(self.pieces.rank[position], self.world_size, self.shard_ranks))

    def index_of(self, path: str) -> int:
        """Return the index of a parameter among the specs."""
        if path not in self._index:
            raise ValueError(
                f"this plan has no parameter {path!r}; it has "
                f"{format_names([spec.path for spec in self.specs], 4)}"
            )
        return self._index[path]

    def indices_of(self, paths: Collection[str]) -> list[int]:
        """Return the indices of known parameters, without a Python call for each."""
        return list(map(self._index.__getitem__, paths))

    def positions_of(self, index: int) -> range:
        """Return the positions of a parameter's pieces in the columns."""
        return range(self._first_positions[index], self._first_positions[index + 1])

    @cached_property
    def _index(self) -> dict[str, int]:
        return {spec.path: index for index, spec in enumerate(self.specs)}

    @cached_property
    def _first_positions(self) -> list[int]:
        found: list[int] = []
        for position, index in enumerate(self.pieces.parameter):
            if index == len(found):
                found.append(position)
        return [*found, len(self.pieces)]

    @cached_property
    def offsets(self) -> list[int]:
        """The offset of each piece in the concatenated pieces of its parameter on its rank."""
        pieces, found = self.pieces, list[int]()
        ends, current = dict[int, int](), -1
        for index, start, stop, rank in pieces.rows():
            if index != current:
                ends, current = {}, index
            found.append(ends.get(rank, 0))
            ends[rank] = found[-1] + stop - start
        return found

    def positions_between(self, index: int, start: int, stop: int) -> range:
        """Return the positions of a parameter's pieces that overlap a range of its elements.

        An empty parameter has one empty piece, which is always returned.
        """
        positions = self.positions_of(index)
        if len(positions) == 1:
            return positions
        first = bisect_right(self.pieces.start, start, positions.start, positions.stop) - 1
        return range(first, bisect_left(self.pieces.start, stop, first, positions.stop))

    def positions_of_rank(self, rank: int) -> list[int]:
        """Return the positions of the pieces of a rank.

        Raises:
            ValueError: the rank does not exist.
        """
        return self._positions_of_rank[self.shard_rank(rank)]

    @cached_property
    def _positions_of_rank(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in range(self.shard_ranks)]
        for position, rank in enumerate(self.pieces.rank):
            found[rank].append(position)
        return found


def views_of(
    specs: Specs, owned: Sequence[OwnedRange], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the views of ``ShardPlan.views``."""
    found: dict[str, Tensor] = {}
    for one in owned:
        spec = specs[one.parameter]
        if spec.path not in tensors:
            raise ValueError(
                f"there is no tensor of {spec.path!r}; give one for each parameter owned"
            )
        tensor = tensors[spec.path]
        if tuple(tensor.shape) != spec.shape:
            raise ValueError(
                f"{spec.path!r} has shape {tuple(tensor.shape)}, and {spec.shape} in the plan; "
                "give the tensors that the plan was made for"
            )
        if one.whole and spec.blocks is None:
            found[one.path] = tensor
            continue
        if not tensor.is_contiguous():
            raise ValueError(
                f"{one.path!r} is cut, and its elements do not have the order of its shape "
                f"(strides {tensor.stride()}); give a contiguous tensor"
            )
        if spec.blocks is None:
            found[f"{one.path}[{one.start}:{one.stop}]"] = tensor.view(-1)[one.start : one.stop]
            continue
        bounds = spec.bounds
        for number, block in enumerate(spec.blocks.split(tensor)):
            if one.start <= bounds[number] and bounds[number + 1] <= one.stop:
                found[f"{one.path}[{number}]"] = block
    return found
