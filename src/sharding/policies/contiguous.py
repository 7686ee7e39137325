"""``contiguous``: each rank owns one run of whole parameters, in the order of the model."""

from sharding.policies.elements import EndToEnd, columns, cut
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
    whole = max(problem.numels, default=0) or 1  # no cut falls within a parameter
    flat = EndToEnd.of(problem, range(len(problem.specs)))
    return Assignment(columns(cut(flat, problem.loads, whole)[1]))
