"""``split_buckets``: runs of parameters within DDP buckets, to the least loaded ranks."""

from collections.abc import Sequence

from sharding.policies.buckets import Buckets, bucket_indices, completed
from sharding.problem import Assignment, Problem


def split_buckets(problem: Problem, *, buckets: Buckets | None = None) -> Assignment:
    """DDP buckets, cut between parameters: torch's ``shard_buckets=True``.

    Buckets are taken by size, smallest first. In each, the longest run of parameters with fewer
    than ``total / ranks`` elements (one parameter at least) goes to the rank with the fewest
    elements, then the next run; no rank gets two runs of one bucket while another has none.

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
        >>> specs = [ParameterSpec(name, (4,)) for name in "abcdef"]
        >>> found = plan(specs, 2, "split_buckets", buckets=[["f", "e", "d", "c"], ["b", "a"]])
        >>> [one.path for one in found.owned(0)]
        ['a', 'b', 'c', 'd']
    """
    indices = bucket_indices(problem, buckets)
    sizes = [sum(problem.numels[index] for index in bucket) for bucket in indices]
    held, ranks = list(problem.elements), dict[int, int]()
    total = sum(sizes)
    for number in sorted(range(len(indices)), key=sizes.__getitem__):
        taken: set[int] = set()
        for run in _runs(indices[number], problem.numels, total, problem.ranks):
            if len(taken) == problem.ranks:
                taken.clear()
            free = (rank for rank in range(problem.ranks) if rank not in taken)
            rank = min(free, key=held.__getitem__)
            taken.add(rank)
            held[rank] += sum(problem.numels[index] for index in run)
            ranks.update(dict.fromkeys(run, rank))
    return completed(problem, ranks)


def _runs(bucket: Sequence[int], numels: Sequence[int], total: int, ranks: int) -> list[list[int]]:
    """A bucket cut before each parameter that would bring its run up to the share of a rank."""
    runs: list[list[int]] = [[]]
    size = 0
    for index in bucket:
        if runs[-1] and (size + numels[index]) * ranks >= total:
            runs.append([])
            size = 0
        runs[-1].append(index)
        size += numels[index]
    return runs
