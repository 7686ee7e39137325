"""``two_resource``: matrices balance time and bytes, all other parameters balance bytes."""

from collections.abc import Callable, Sequence
from heapq import heapify, heapreplace
from typing import NamedTuple

from sharding.pieces import Row, pieces_of
from sharding.policies.elements import cut_to_level
from sharding.problem import Assignment, Problem, mixed_lower_bound


class Load(NamedTuple):
    """Cost in two resources, of a matrix or of a rank."""

    time: int
    bytes: int


Key = Callable[[Load], int]
"""Key of a load: the rank with the smallest key gets the next matrix."""


def two_resource(problem: Problem, *, align: int | None = None) -> Assignment:
    """Balance the time of a step and the memory at the same time: vector scheduling.

    Matrices (and blocks of parameters) stay whole. They are assigned in descending order, each to a
    rank with a small load in both resources. Pointwise parameters are then concatenated and cut at
    elements, so that they balance the bytes. They need little time: a step of AdamW has 14
    operations per element, and Muon has thousands.

    Three keys are tried: time, the larger share of both resources, and the sum of the shares. The
    result is the plan with the smallest ratio to the lower bound, in the worse resource.

    Args:
        problem: the parameters, their costs and the ranks.
        align: as for :func:`sharding.elements`.

    Returns:
        Whole matrices, and ranges of all other parameters.

    Raises:
        TypeError: the alignment is not an integer.
        ValueError: the rule does not allow the alignment.

    Example::

        >>> from functional_optim import adamw, muon
        >>> from sharding import ParameterSpec, plan
        >>> specs = [ParameterSpec(name, (64, 64), kind="per_matrix") for name in "abc"]
        >>> specs.append(ParameterSpec("embedding", (100, 64)))
        >>> def rule(spec):
        ...     return muon() if spec.kind == "per_matrix" else adamw()
        >>> numbers = plan(specs, 2, "two_resource", rule).report(rule)
        >>> round(numbers.imbalance("flops"), 2), round(numbers.imbalance(), 2)
        (1.33, 1.0)

    Reference:
        Chekuri, Khanna, "On multidimensional packing problems", SIAM J. Comput. 33, 2004: vector
        scheduling; Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17,
        1969: the longest first.
    """
    matrices = [i for i, spec in enumerate(problem.specs) if spec.kind == "per_matrix"]
    rest = [i for i, spec in enumerate(problem.specs) if spec.kind == "pointwise"]
    times, sizes = (weights.whole(problem.numels) for weights in (problem.times, problem.weights))
    items = [Load(times[index], sizes[index]) for index in matrices]
    start = [Load(*one) for one in zip(problem.time_loads, problem.loads, strict=True)]
    goal = Load(
        max(1, mixed_lower_bound(problem.specs, times, problem.time_loads)),
        max(1, mixed_lower_bound(problem.specs, sizes, problem.loads)),
    )
    owners = min(
        (_assign_items(items, start, key) for key in _keys(goal)),
        key=lambda found: _worst_ratio(items, start, found, goal),
    )
    loads = list(problem.loads)
    rows: list[Row] = []
    for index, item, rank in zip(matrices, items, owners, strict=True):
        rows.append((index, 0, problem.numels[index], rank))
        loads[rank] += item.bytes
    return Assignment(pieces_of(rows + cut_to_level(problem, rest, loads, align)))


def _keys(goal: Load) -> tuple[Key, ...]:
    """Return the keys to try. Shares are integers with a common denominator."""
    return (
        lambda load: load.time * goal.bytes,
        lambda load: max(load.time * goal.bytes, load.bytes * goal.time),
        lambda load: load.time * goal.bytes + load.bytes * goal.time,
    )


def _assign_items(items: Sequence[Load], start: Sequence[Load], key: Key) -> list[int]:
    """Assign the item with the largest key first, each to the rank with the smallest key."""
    order = sorted(
        range(len(items)), key=lambda item: (key(items[item]), items[item]), reverse=True
    )
    heap = [(key(load), load.time, load.bytes, rank) for rank, load in enumerate(start)]
    heapify(heap)
    owners = [0] * len(items)
    for item in order:
        _, time, size, rank = heap[0]
        load = Load(time + items[item].time, size + items[item].bytes)
        heapreplace(heap, (key(load), load.time, load.bytes, rank))
        owners[item] = rank
    return owners


def _worst_ratio(
    items: Sequence[Load], start: Sequence[Load], owners: Sequence[int], goal: Load
) -> tuple[int, int]:
    """Return the larger ratio to the goal, and the sum of both ratios; smaller is better."""
    times = [load.time for load in start]
    sizes = [load.bytes for load in start]
    for item, rank in zip(items, owners, strict=True):
        times[rank] += item.time
        sizes[rank] += item.bytes
    shares = (max(*times, goal.time) * goal.bytes, max(*sizes, goal.bytes) * goal.time)
    return max(shares), sum(shares)
