"""Makespan scheduling: whole items to ranks, largest first, and a lower bound of the largest load.

Items have weights, and ranks may start with loads. All are integers, so comparisons are exact.
"""

from collections.abc import Sequence
from heapq import heapify, heapreplace
from itertools import accumulate


def lower_bound(weights: Sequence[int], loads: Sequence[int], divisible: int = 0) -> int:
    """Return a lower bound of the largest load, for every assignment of whole items.

    It is the maximum of these: the present loads; the level to which all weights fill the loads;
    the largest item on the emptiest rank; and, for each k, the sum of the k lightest of the
    ``(k - 1) * ranks + 1`` heaviest items, of which k must share a rank (here loads are items too).

    Args:
        weights: of whole items.
        loads: the present load of each rank.
        divisible: the weight of items that can be cut anywhere.
    """
    ranks = len(loads)
    bound = max(*loads, level(sum(weights) + divisible, loads))
    if weights:
        bound = max(bound, min(loads) + max(weights))
    items = sorted((*weights, *(load for load in loads if load)), reverse=True)
    sums = [0, *accumulate(items)]
    for k in range(2, (len(items) - 1) // ranks + 2):
        end = (k - 1) * ranks + 1
        bound = max(bound, sums[end] - sums[end - k])
    return bound


def level(total: int, loads: Sequence[int]) -> int:
    """Return the level to which a divisible total fills the loads, rounded up."""
    ordered = sorted(loads)
    present, height = 0, 0
    for count, load in enumerate(ordered, start=1):
        present += load
        height = -(-(total + present) // count)
        if count < len(ordered) and height <= ordered[count]:
            break
    return height


def largest_first_ranks(
    order: Sequence[int], weights: Sequence[int], loads: Sequence[int]
) -> list[int]:
    """Assign each item, in order, to the least loaded rank; in a tie, to the lowest rank."""
    ranks = len(loads)
    # Load and rank are one integer, because integers compare faster than tuples.
    heap = [load * ranks + rank for rank, load in enumerate(loads)]
    heapify(heap)
    owners = [0] * len(weights)
    for item in order:
        top = heap[0]
        owners[item] = top % ranks
        heapreplace(heap, top + weights[item] * ranks)
    return owners
