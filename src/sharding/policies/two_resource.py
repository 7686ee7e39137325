"""``two_resource``: matrices by the time of their steps, and the rest by bytes."""

from collections.abc import Callable, Sequence
from heapq import heapify, heapreplace
from typing import NamedTuple

from sharding.makespan import lower_bound
from sharding.pieces import Row
from sharding.policies.elements import columns, levelled
from sharding.problem import Assignment, Problem


class Load(NamedTuple):
    """Cost in two resources, of a matrix or of a rank."""

    time: int
    bytes: int


Key = Callable[[Load], int]
"""Order of ranks: the one with the least key gets the next matrix."""


def two_resource(problem: Problem, *, align: int | None = None) -> Assignment:
    """Level the time of a step and the memory at once: vector scheduling.

    Matrices (and blocks of parameters) stay whole. Each goes, the longest first, to a rank with
    little of both resources. Pointwise parameters are then laid end to end and cut at elements, so
    that they fill up the bytes. They take little time: a step of AdamW has 14 operations for each
    element, and Muon has thousands.

    Three orders of ranks are tried: by time, by the larger share of both resources, and by the sum
    of the shares. The plan whose larger ratio to its lower bound is smallest is taken.

    Args:
        problem: the parameters, their costs and the ranks.
        align: as for :func:`sharding.elements`.

    Returns:
        Matrices whole, and ranges of all other parameters.

    Raises:
        TypeError: an alignment that is no whole number.
        ValueError: an alignment that the rule does not allow.

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
    held = [Load(*one) for one in zip(problem.time_loads, problem.loads, strict=True)]
    goal = Load(
        max(1, _bound(times, matrices, problem.time_loads)),
        max(1, _bound(sizes, matrices, problem.loads)),
    )
    owners = min(
        (_spread(items, held, key) for key in _keys(goal)),
        key=lambda found: _height(items, held, found, goal),
    )
    loads = list(problem.loads)
    rows: list[Row] = []
    for index, item, rank in zip(matrices, items, owners, strict=True):
        rows.append((index, 0, problem.numels[index], rank))
        loads[rank] += item.bytes
    return Assignment(columns(rows + levelled(problem, rest, loads, align)))


def _bound(costs: Sequence[int], matrices: Sequence[int], loads: Sequence[int]) -> int:
    """Return a load that some rank has in every plan that leaves matrices whole."""
    whole = [costs[index] for index in matrices]
    return lower_bound(whole, loads, sum(costs) - sum(whole))


def _keys(goal: Load) -> tuple[Key, ...]:
    """Return the orders that are tried; shares are whole numbers, with one denominator."""
    return (
        lambda load: load.time * goal.bytes,
        lambda load: max(load.time * goal.bytes, load.bytes * goal.time),
        lambda load: load.time * goal.bytes + load.bytes * goal.time,
    )


def _spread(items: Sequence[Load], held: Sequence[Load], key: Key) -> list[int]:
    """Each item, the one with the largest key first, to the rank with the least key."""
    order = sorted(
        range(len(items)), key=lambda item: (key(items[item]), items[item]), reverse=True
    )
    heap = [(key(load), load.time, load.bytes, rank) for rank, load in enumerate(held)]
    heapify(heap)
    owners = [0] * len(items)
    for item in order:
        _, time, size, rank = heap[0]
        load = Load(time + items[item].time, size + items[item].bytes)
        heapreplace(heap, (key(load), load.time, load.bytes, rank))
        owners[item] = rank
    return owners


def _height(
    items: Sequence[Load], held: Sequence[Load], owners: Sequence[int], goal: Load
) -> tuple[int, int]:
    """Return the larger ratio to the goal, and the sum of both: smaller is better."""
    times = [load.time for load in held]
    sizes = [load.bytes for load in held]
    for item, rank in zip(items, owners, strict=True):
        times[rank] += item.time
        sizes[rank] += item.bytes
    shares = (max(*times, goal.time) * goal.bytes, max(*sizes, goal.bytes) * goal.time)
    return max(shares), sum(shares)
