"""``largest_first``: whole parameters, by cost, the largest first."""

from sharding.makespan import largest_first_ranks
from sharding.pieces import whole_pieces
from sharding.problem import Assignment, Problem


def largest_first(problem: Problem) -> Assignment:
    """Assign the parameter with the largest cost first, each to the least loaded rank.

    The largest load is at most ``bound + (1 - 1 / ranks) * largest parameter``. So it is within 1 %
    of the lower bound if no parameter is larger than 1 % of the mean load. It is at most 4/3 of the
    best possible.

    Args:
        problem: the parameters, their costs and the ranks.

    Returns:
        Whole parameters, each with its rank.

    Example::

        >>> from sharding import ParameterSpec, plan
        >>> specs = [ParameterSpec(name, (size,)) for name, size in zip("abc", (3, 5, 4))]
        >>> plan(specs, 2, "largest_first").report().elements
        (5, 7)

    Reference:
        Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17, 1969: longest
        processing time first (LPT).
    """
    weights = problem.weights.whole(problem.numels)
    order = sorted(range(len(weights)), key=weights.__getitem__, reverse=True)
    ranks = largest_first_ranks(order, weights, problem.loads)
    return Assignment(whole_pieces(problem.numels, ranks))
