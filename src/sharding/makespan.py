"""Whole items to ranks, so that the largest load is small: heuristics, exact search, a bound.

Items have weights, ranks may start with loads; all are whole numbers, so that comparisons are
exact. Every function returns the rank of each item. Work is bounded by counts of operations,
never by time: the result is the same everywhere.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heapify, heapreplace
from itertools import accumulate

SMALL = 2_000
"""Up to so many items the search goes on until the bound is met; above, to 1/10,000 of it."""
PACKING_OPERATIONS = 500_000
SWAP_OPERATIONS = 300_000
SEARCH_ITEMS = 24
SEARCH_NODES = 60_000


def spread(weights: Sequence[int], loads: Sequence[int]) -> list[int]:
    """The best of what is known here: never worse than largest first, optimal for few items."""
    order = sorted(range(len(weights)), key=weights.__getitem__, reverse=True)
    bound = lower_bound(weights, loads)
    goal = bound if len(weights) <= SMALL else bound + bound // 10_000
    best = largest_first(order, weights, loads)
    best_load = largest_load(best, weights, loads)
    if best_load > goal:
        best, best_load = _better(_packed(order, weights, loads, goal, best_load), best, best_load)
    if best_load > goal:
        swapped = swaps(best, weights, loads, goal)
        best, best_load = swapped, largest_load(swapped, weights, loads)
    if best_load > goal:
        best, _ = _better(searched(order, weights, loads, goal, best_load), best, best_load)
    return best


def _better(
    found: tuple[list[int], int] | None, best: list[int], best_load: int
) -> tuple[list[int], int]:
    return (best, best_load) if found is None else found


def largest_load(owners: Sequence[int], weights: Sequence[int], loads: Sequence[int]) -> int:
    """The load of the fullest rank."""
    total = list(loads)
    for owner, weight in zip(owners, weights, strict=True):
        total[owner] += weight
    return max(total)


def lower_bound(weights: Sequence[int], loads: Sequence[int]) -> int:
    """A load that some rank has in every assignment of whole items.

    The largest of: the loads there are; the level that all weights fill the loads up to; the
    largest item on the emptiest rank; and, for each k, the k lightest of the ``(k - 1) * ranks +
    1`` heaviest items, k of which share a rank (loads count as items here).
    """
    ranks = len(loads)
    bound = max(*loads, level(sum(weights), loads))
    if weights:
        bound = max(bound, min(loads) + max(weights))
    items = sorted((*weights, *(load for load in loads if load)), reverse=True)
    sums = [0, *accumulate(items)]
    for k in range(2, (len(items) - 1) // ranks + 2):
        end = (k - 1) * ranks + 1
        bound = max(bound, sums[end] - sums[end - k])
    return bound


def level(total: int, loads: Sequence[int]) -> int:
    """The height up to which a total that can be cut anywhere fills the loads, rounded up."""
    ordered = sorted(loads)
    held, height = 0, 0
    for count, load in enumerate(ordered, start=1):
        held += load
        height = -(-(total + held) // count)
        if count < len(ordered) and height <= ordered[count]:
            break
    return height


def largest_first(order: Sequence[int], weights: Sequence[int], loads: Sequence[int]) -> list[int]:
    """Each item, in order, to the least loaded rank; ties to the lowest rank."""
    ranks = len(loads)
    # Load and rank in one number, so that a comparison is one comparison of integers.
    heap = [load * ranks + rank for rank, load in enumerate(loads)]
    heapify(heap)
    owners = [0] * len(weights)
    for item in order:
        top = heap[0]
        owners[item] = top % ranks
        heapreplace(heap, top + weights[item] * ranks)
    return owners


def _packed(
    order: Sequence[int], weights: Sequence[int], loads: Sequence[int], low: int, high: int
) -> tuple[list[int], int] | None:
    """Multifit: the smallest capacity found, by halving, that largest-first packing fits into."""
    found: tuple[list[int], int] | None = None
    for _ in range(min(14, PACKING_OPERATIONS // len(weights))):
        if low >= high:
            break
        capacity = (low + high) // 2
        owners = _fit(order, weights, loads, capacity)
        if owners is None:
            low = capacity + 1
        else:
            high = largest_load(owners, weights, loads)
            found = owners, high
    return found


def _fit(
    order: Sequence[int], weights: Sequence[int], loads: Sequence[int], capacity: int
) -> list[int] | None:
    """Items into ranks of a capacity, each where it fits most tightly; None if one does not fit."""
    ranks = len(loads)
    room = sorted((capacity - load) * ranks + rank for rank, load in enumerate(loads))
    owners = [0] * len(weights)
    for item in order:
        place = bisect_left(room, weights[item] * ranks)
        if place == ranks:
            return None
        one = room.pop(place)
        owners[item] = one % ranks
        insort(room, one - weights[item] * ranks)
    return owners


def swaps(
    owners: Sequence[int], weights: Sequence[int], loads: Sequence[int], goal: int
) -> list[int]:
    """Local search: moves and swaps between the fullest rank and others, while they help."""
    owners = list(owners)
    total = list(loads)
    held: list[list[tuple[int, int]]] = [[] for _ in loads]
    for item, owner in enumerate(owners):
        total[owner] += weights[item]
        held[owner].append((weights[item], item))
    for items in held:
        items.sort()
    left = SWAP_OPERATIONS
    while left > 0:
        fullest = max(range(len(total)), key=total.__getitem__)
        if total[fullest] <= goal:
            break
        for other in sorted(range(len(total)), key=total.__getitem__):
            gap = total[fullest] - total[other]
            if gap < 2:
                return owners
            left -= len(held[fullest]) + 1
            swap = _best_swap(held[fullest], held[other], gap)
            if swap is not None:
                there, back = swap
                _move(held, owners, there, fullest, other)
                if back is not None:
                    _move(held, owners, back, other, fullest)
                change = there[0] - (back[0] if back else 0)
                total[fullest] -= change
                total[other] += change
                break
        else:
            return owners
    return owners


def _best_swap(
    items: list[tuple[int, int]], others: list[tuple[int, int]], gap: int
) -> tuple[tuple[int, int], tuple[int, int] | None] | None:
    """The item to hand over, and the one to take back, that leave the two ranks most even."""
    best = gap
    found: tuple[tuple[int, int], tuple[int, int] | None] | None = None
    for one in items:
        if 0 < one[0] < gap and abs(2 * one[0] - gap) < best:
            best, found = abs(2 * one[0] - gap), (one, None)
        near = bisect_left(others, (one[0] - gap // 2, -1))
        for back in others[max(near - 1, 0) : near + 1]:
            change = one[0] - back[0]
            if 0 < change < gap and abs(2 * change - gap) < best:
                best, found = abs(2 * change - gap), (one, back)
    return found


def _move(
    held: list[list[tuple[int, int]]],
    owners: list[int],
    item: tuple[int, int],
    source: int,
    target: int,
) -> None:
    del held[source][bisect_left(held[source], item)]
    insort(held[target], item)
    owners[item[1]] = target


def searched(
    order: Sequence[int], weights: Sequence[int], loads: Sequence[int], goal: int, best: int
) -> tuple[list[int], int] | None:
    """Branch and bound over few items: the optimum, unless the nodes run out. None if no gain."""
    items = [item for item in order if weights[item]]
    if len(items) > SEARCH_ITEMS:
        return None
    rest = [sum(weights[item] for item in items[depth:]) for depth in range(len(items) + 1)]
    total, owners = list(loads), [0] * len(weights)
    found: list[int] | None = None
    left = SEARCH_NODES

    def descend(depth: int) -> None:
        nonlocal best, found, left
        left -= 1
        if depth == len(items):
            best, found = max(total), list(owners)
            return
        if sum(best - 1 - load for load in total) < rest[depth]:
            return
        item = items[depth]
        tried: set[int] = set()
        for rank in sorted(range(len(total)), key=total.__getitem__):
            height = total[rank] + weights[item]
            # Ranks of one load are interchangeable; sorted, so the first that is too high ends it.
            if height >= best or left <= 0 or best <= goal:
                return
            if total[rank] in tried:
                continue
            tried.add(total[rank])
            owners[item] = rank
            total[rank] = height
            descend(depth + 1)
            total[rank] -= weights[item]

    descend(0)
    return None if found is None else (found, best)
