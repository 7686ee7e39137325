"""``greedy``: the partition of torch's ZeroRedundancyOptimizer."""

from sharding.makespan import largest_first_ranks
from sharding.pieces import whole_pieces
from sharding.problem import Assignment, Problem


def greedy(problem: Problem) -> Assignment:
    """Assign the largest parameter first to the least loaded rank, as ZeroRedundancyOptimizer.

    The result equals that of torch's class. In each group, parameters are sorted by number of
    elements (stable), and assigned to the rank with the fewest elements so far; in a tie, to the
    lowest rank. Loads are carried over to the next group. Frozen parameters count. The cost model
    is not used.

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
    loads = list(problem.elements)
    ranks = [0] * len(problem.numels)
    for group in problem.groups:
        order = sorted(group, key=problem.numels.__getitem__, reverse=True)  # stable
        found = largest_first_ranks(order, problem.numels, loads)
        for index in group:
            ranks[index] = found[index]
            loads[found[index]] += problem.numels[index]
    return Assignment(whole_pieces(problem.numels, ranks))
