"""``by_bucket``: whole DDP buckets, in turn."""

from sharding.policies.buckets import Buckets, bucket_indices, completed
from sharding.problem import Assignment, Problem


def by_bucket(problem: Problem, *, buckets: Buckets | None = None) -> Assignment:
    """Whole DDP buckets: bucket ``i`` to rank ``i % ranks``, as torch's interleaved ZeRO has it.

    A bucket's owner can then step as soon as its reduction is done. When a plan is extended, the
    new buckets start at the rank with the fewest elements.

    Args:
        problem: the parameters and the ranks.
        buckets: paths, bucket by bucket; by default those of :func:`sharding.ddp_buckets`.
            Parameters in none go, largest first, to the least loaded rank.

    Returns:
        Whole parameters, each with its rank.

    Raises:
        ValueError: a path that is no parameter's or stands twice, or an empty bucket.

    Example::

        >>> from sharding import ParameterSpec, plan
        >>> specs = [ParameterSpec(name, (4,)) for name in "abc"]
        >>> found = plan(specs, 2, "by_bucket", buckets=[["c", "b"], ["a"]])
        >>> [one.path for one in found.owned(0)]
        ['b', 'c']
    """
    first = problem.elements.index(min(problem.elements))
    ranks = {
        index: (first + number) % problem.ranks
        for number, bucket in enumerate(bucket_indices(problem, buckets))
        for index in bucket
    }
    return completed(problem, ranks)
