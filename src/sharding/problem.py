"""Input and output of a policy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from functional_optim.core.brief import brief
from sharding.pieces import Pieces
from sharding.spec import ParameterSpec
from sharding.weights import Weights


@dataclass(frozen=True)
class Problem:
    """Parameters to be given to ranks: what a policy is called with.

    Columns run parallel to ``specs``.

    Example::

        >>> from sharding import Assignment, ParameterSpec, Pieces, plan
        >>> def in_turn(problem: Problem) -> Assignment:
        ...     every = range(len(problem.specs))
        ...     ranks = tuple(index % problem.ranks for index in every)
        ...     return Assignment(Pieces(tuple(every), (0,) * len(every), problem.numels, ranks))
        >>> plan([ParameterSpec(name, (3,)) for name in "abc"], 2, in_turn).report().elements
        (6, 3)
    """

    specs: tuple[ParameterSpec, ...]
    """The parameters; each block of a parameter with blocks is one by itself."""
    numels: tuple[int, ...]
    """Their numbers of elements."""
    weights: Weights
    """Their costs, by the cost model chosen: bytes, where that has two resources."""
    times: Weights
    """The time of a step of each, where the cost model has two resources; else the costs again."""
    ranks: int
    """How many ranks share them."""
    loads: tuple[int, ...]
    """For each rank, the cost of what it has already (of a plan that is extended)."""
    time_loads: tuple[int, ...]
    """For each rank, the time of what it has already."""
    elements: tuple[int, ...]
    """For each rank, the number of elements that it has already."""
    unit: int = 1
    """Parameters may be cut at multiples of this many of their elements."""

    @property
    def groups(self) -> list[list[int]]:
        """The parameters of each group, in the order of groups."""
        found: dict[int, list[int]] = {}
        for index, spec in enumerate(self.specs):
            found.setdefault(spec.group, []).append(index)
        return [found[group] for group in sorted(found)]


@dataclass(frozen=True)
class Assignment:
    """Decision of a policy.

    Example::

        >>> from sharding import Pieces
        >>> Assignment(Pieces((0,), (0,), (5,), (1,))).replicas
        1
    """

    pieces: Pieces
    """Who owns what, for the ranks of one replica."""
    replicas: int = 1
    """How many groups of ranks each hold everything, one after another."""
    within: str = ""
    """The policy within a replica, where there are several."""


Policy = Callable[..., Assignment]
"""``policy(problem, **options) -> Assignment``, a pure function."""


def loads_of(
    pieces: Pieces, numels: Sequence[int], weights: Weights, ranks: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(cost, elements) on each rank."""
    costs, elements = [0] * ranks, [0] * ranks
    if pieces.stop == tuple(numels):  # every parameter is whole
        lengths: Sequence[int] = numels
    else:
        lengths = [b - a for a, b in zip(pieces.start, pieces.stop, strict=True)]
    of_piece = weights.of(pieces.parameter, lengths)
    for rank, cost, length in zip(pieces.rank, of_piece, lengths, strict=True):
        costs[rank] += cost
        elements[rank] += length
    return tuple(costs), tuple(elements)


def checked_int(name: str, value: Any, least: int) -> int:
    """A whole number of at least so much.

    Raises:
        TypeError: no whole number.
        ValueError: too small.
    """
    if type(value) is not int:
        raise TypeError(f"{name} must be a whole number >= {least}, got {brief(value)}")
    if value < least:
        raise ValueError(f"{name} must be a whole number >= {least}, got {value}")
    return value


MOST_RANKS = 1 << 18
"""No machine has more, and what is kept for each of so many is still quickly made."""


def checked_ranks(world_size: Any) -> int:
    """A number of ranks.

    Raises:
        TypeError: no whole number.
        ValueError: too small, or too large.
    """
    if checked_int("world_size", world_size, 1) > MOST_RANKS:
        raise ValueError(f"world_size must be at most {MOST_RANKS}, got {world_size}")
    return int(world_size)
