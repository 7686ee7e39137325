"""``contiguous``: each rank owns one run of whole parameters, in the order of the model."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from sharding.makespan import level
from sharding.pieces import whole_pieces
from sharding.problem import Assignment, Problem


def contiguous(problem: Problem) -> Assignment:
    """Whole parameters in the order of the model, cut into one run for each rank.

    The largest load (by the cost model) is the smallest that such runs allow: it is found by
    halving, since filling ranks in turn up to a height uses the fewest ranks for that height.

    Args:
        problem: the parameters, their costs and the ranks.

    Returns:
        Whole parameters, each with its rank; ranks never fall from one parameter to the next.

    Example::

        >>> from sharding import ParameterSpec, plan
        >>> specs = [ParameterSpec(name, (size,)) for name, size in zip("abcd", (4, 1, 1, 3))]
        >>> plan(specs, 2, "contiguous").report().elements
        (5, 4)
    """
    weights = problem.weights.whole(problem.numels)
    sums = [0, *accumulate(weights)]
    low = max(level(sums[-1], problem.loads), 0)
    high = low
    while _ends(sums, problem.loads, high) is None:
        low, high = high + 1, 2 * high + 1
    while low < high:
        middle = (low + high) // 2
        if _ends(sums, problem.loads, middle) is None:
            low = middle + 1
        else:
            high = middle
    ends = None
    if min(problem.loads) == max(problem.loads):
        ends = _ends(sums, problem.loads, high, even=True)
    if ends is None:
        ends = _ends(sums, problem.loads, high)
    assert ends is not None
    ranks: list[int] = []
    for rank, end in enumerate(ends):
        ranks += [rank] * (end - len(ranks))
    return Assignment(whole_pieces(problem.numels, ranks))


def _ends(
    sums: Sequence[int], loads: Sequence[int], height: int, *, even: bool = False
) -> list[int] | None:
    """Where each rank's run ends when all are filled up to a height; None if some is left over.

    With ``even``, a rank stops once it has its part of what is left, so that no rank is left
    emptier than need be; that may fail.
    """
    ends, at = [], 0
    for rank, load in enumerate(loads):
        if load <= height:
            farthest = bisect_right(sums, sums[at] + height - load) - 1
            part = -(-(sums[-1] - sums[at]) // (len(loads) - rank))
            wanted = bisect_left(sums, sums[at] + part) if even and part else farthest
            at = min(farthest, wanted)
        ends.append(at)
    return ends if at == len(sums) - 1 else None
