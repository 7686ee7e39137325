"""``contiguous``: each rank owns consecutive whole parameters, in the order of the model."""

from sharding.pieces import pieces_of
from sharding.policies.elements import ElementLayout, cut_at_lowest_level
from sharding.problem import Assignment, Problem


def contiguous(problem: Problem) -> Assignment:
    """Assign consecutive whole parameters to each rank, in the order of the model.

    The largest load (by the cost model) is the smallest that is possible. It is found by bisection:
    filling ranks in turn up to a level needs the fewest ranks for that level.

    Args:
        problem: the parameters, their costs and the ranks.

    Returns:
        Whole parameters, each with its rank; ranks never decrease from one parameter to the next.

    Example::

        >>> from sharding import ParameterSpec, plan
        >>> specs = [ParameterSpec(name, (size,)) for name, size in zip("abcd", (4, 1, 1, 3))]
        >>> plan(specs, 2, "contiguous").report().elements
        (5, 4)
    """
    whole = max(problem.numels, default=0) or 1  # no cut falls within a parameter
    flat = ElementLayout.of(problem, range(len(problem.specs)))
    return Assignment(pieces_of(cut_at_lowest_level(flat, problem.loads, whole)[1]))
