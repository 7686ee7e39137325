"""``greedy``: the partition of torch's ZeroRedundancyOptimizer."""

from sharding.makespan import largest_first_ranks
from sharding.pieces import whole_pieces
from sharding.problem import Assignment, Problem


def greedy_ranks(problem: Problem) -> list[int]:
    """The rank of each parameter."""
    held = list(problem.elements)
    ranks = [0] * len(problem.numels)
    for group in problem.groups:
        order = sorted(group, key=problem.numels.__getitem__, reverse=True)  # stable
        found = largest_first_ranks(order, problem.numels, held)
        for index in group:
            ranks[index] = found[index]
            held[found[index]] += problem.numels[index]
    return ranks


def greedy(problem: Problem) -> Assignment:
    """Largest first to the least loaded rank, exactly as torch's ZeroRedundancyOptimizer does it.

    Group by group, in each by number of elements (stable), to the rank with the fewest elements
    so far, ties to the lowest rank; loads are carried across groups, frozen parameters count.
    Elements are counted whatever the cost model.

    Args:
        problem: the parameters and the ranks.

    Returns:
        Whole parameters, each with its rank.

    Example::

        >>> from sharding import ParameterSpec, plan
        >>> specs = [ParameterSpec(name, (size,)) for name, size in zip("abc", (3, 5, 4))]
        >>> [one.path for one in plan(specs, 2, "greedy").owned(1)]
        ['a', 'c']

    Reference:
        Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17, 1969: the
        largest load is at most 4/3 - 1/(3 ranks) of the best possible.
    """
    return Assignment(whole_pieces(problem.numels, greedy_ranks(problem)))
