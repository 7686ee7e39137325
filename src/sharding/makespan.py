"""Whole items to ranks, so that the largest load is small: the longest first, and a lower bound.

Items have weights, ranks may start with loads; all are whole numbers, so that comparisons are
exact.
"""

from collections.abc import Sequence
from heapq import heapify, heapreplace
from itertools import accumulate


def largest_load(owners: Sequence[int], weights: Sequence[int], loads: Sequence[int]) -> int:
    """The load of the fullest rank."""
    total = list(loads)
    for owner, weight in zip(owners, weights, strict=True):
        total[owner] += weight
    return max(total)


def lower_bound(weights: Sequence[int], loads: Sequence[int], divisible: int = 0) -> int:
    """A load that some rank has in every assignment of whole items.

    The largest of: the loads there are; the level that all weights fill the loads up to; the
    largest item on the emptiest rank; and, for each k, the k lightest of the ``(k - 1) * ranks +
    1`` heaviest items, k of which share a rank (loads count as items here).

    Args:
        weights: of whole items.
        loads: for each rank, what it has already.
        divisible: the weight of what may be cut anywhere.
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
    """The height up to which a total that can be cut anywhere fills the loads, rounded up."""
    ordered = sorted(loads)
    held, height = 0, 0
    for count, load in enumerate(ordered, start=1):
        held += load
        height = -(-(total + held) // count)
        if count < len(ordered) and height <= ordered[count]:
            break
    return height


def largest_first_ranks(
    order: Sequence[int], weights: Sequence[int], loads: Sequence[int]
) -> list[int]:
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
