"""Input and output of a policy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from functional_optim.engine.messages import format_value
from sharding.makespan import lower_bound
from sharding.pieces import Pieces
from sharding.spec import ParameterSpec
from sharding.weights import Weights


@dataclass(frozen=True)
class Problem:
    """Argument of a policy: parameters to assign to ranks.

    Columns have one entry for each of ``specs``.

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
    """The parameters. Each block of a parameter counts as a parameter."""
    numels: tuple[int, ...]
    """The numbers of elements."""
    weights: Weights
    """The costs by the cost model; bytes if the model has two resources."""
    times: Weights
    """The time of a step of each parameter; equal to ``weights`` if the model has one resource."""
    ranks: int
    """The number of ranks."""
    loads: tuple[int, ...]
    """For each rank, the cost of the parameters that it already owns, if a plan is extended."""
    time_loads: tuple[int, ...]
    """For each rank, the time of the parameters that it already owns."""
    elements: tuple[int, ...]
    """For each rank, the number of elements that it already owns."""
    unit: int = 1
    """Parameters can be cut at multiples of this number of elements."""

    @property
    def groups(self) -> list[list[int]]:
        """The indices of the parameters of each group, in the order of groups."""
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
    """Ranges of elements and their owners, for the ranks of one replica."""
    replicas: int = 1
    """Number of groups of consecutive ranks that each own all elements."""
    within: str = ""
    """The policy within a replica, if there are several."""


Policy = Callable[..., Assignment]
"""``policy(problem, **options) -> Assignment``, a pure function."""


def mixed_lower_bound(
    specs: Sequence[ParameterSpec], costs: Sequence[int], loads: Sequence[int]
) -> int:
    """Return a lower bound of the largest load, for plans that leave matrices whole."""
    pairs = list(zip(specs, costs, strict=True))
    matrices = [cost for spec, cost in pairs if spec.kind == "per_matrix"]
    return lower_bound(matrices, loads, sum(costs) - sum(matrices))


def check_int(name: str, value: Any, least: int) -> int:
    """Return an integer that is at least ``least``."""
    if type(value) is not int:
        raise TypeError(f"{name} must be a whole number >= {least}, got {format_value(value)}")
    if value < least:
        raise ValueError(f"{name} must be a whole number >= {least}, got {value}")
    return value


MOST_RANKS = 1 << 18
"""The largest world size. A plan allocates some memory for each rank."""


def check_world_size(world_size: Any) -> None:
    """Check a number of ranks."""
    if check_int("world_size", world_size, 1) > MOST_RANKS:
        raise ValueError(f"world_size must be at most {MOST_RANKS}, got {world_size}")
