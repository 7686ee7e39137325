"""``balanced``: whole parameters, as even as they can be made."""

from sharding.makespan import largest_load, spread
from sharding.pieces import whole_pieces
from sharding.policies.greedy import greedy_ranks
from sharding.problem import Assignment, Problem


def balanced(problem: Problem) -> Assignment:
    """Whole parameters, so that the largest load (by the cost model) is as small as can be found.

    Largest first, then multifit packing, then moves and swaps, then branch and bound for few
    parameters, until a lower bound is met; and :func:`greedy`, if that is better. So the largest
    load is

    * never above greedy's, by the cost model that is levelled;
    * never above ``bound + (1 - 1 / ranks) * largest parameter``, so within 1 % of the bound
      wherever no parameter is larger than 1 % of the mean load;
    * the best possible for few parameters (a dozen or so), and wherever the bound is met.

    Args:
        problem: the parameters, their costs and the ranks.

    Returns:
        Whole parameters, each with its rank.

    Example::

        >>> from sharding import ParameterSpec, plan
        >>> specs = [ParameterSpec(name, (size,)) for name, size in zip("abcde", (3, 3, 2, 2, 2))]
        >>> plan(specs, 2, "greedy").report().elements
        (7, 5)
        >>> plan(specs, 2, "balanced").report().elements
        (6, 6)

    Reference:
        Coffman, Garey, Johnson, "An application of bin-packing to multiprocessor scheduling",
        SIAM J. Comput. 7, 1978.
    """
    weights = problem.weights.whole(problem.numels)
    plans = [spread(weights, problem.loads), greedy_ranks(problem)]
    best = min(plans, key=lambda ranks: largest_load(ranks, weights, problem.loads))
    return Assignment(whole_pieces(problem.numels, best))
