"""Buckets: the runs of parameters whose gradients DDP reduces together."""

from collections.abc import Sequence

from sharding.makespan import largest_first
from sharding.pieces import whole_pieces
from sharding.problem import Assignment, Problem
from sharding.spec import ParameterSpec

Buckets = Sequence[Sequence[str]]
"""Paths of parameters, bucket by bucket, in the order in which DDP numbers its buckets."""

MIB = 2**20


def ddp_buckets(
    specs: Sequence[ParameterSpec],
    bucket_bytes: int = 25 * MIB,
    first_bucket_bytes: int = MIB,
) -> list[list[str]]:
    """Buckets like those of DistributedDataParallel, where its own are not known.

    DDP fills buckets in the order in which gradients become ready, which is about the reverse of
    the model's, apart for each dtype and device; a bucket is closed once it has reached its size,
    the first one (of each dtype and device) at ``first_bucket_bytes``.

    Args:
        specs: the parameters; frozen ones are in no bucket.
        bucket_bytes: DDP's ``bucket_cap_mb``, in bytes.
        first_bucket_bytes: the same for the first bucket, which is to be reduced early.

    Returns:
        The paths in each bucket.

    Example::

        >>> specs = [ParameterSpec(name, (100,)) for name in "abc"]
        >>> ddp_buckets(specs, bucket_bytes=800, first_bucket_bytes=400)
        [['c'], ['b', 'a']]
    """
    filling: dict[tuple[object, str], list[str]] = {}
    sizes: dict[tuple[object, str], int] = {}
    full_before: set[tuple[object, str]] = set()
    buckets: list[list[str]] = []
    for spec in reversed(specs):
        if not spec.requires_grad:
            continue
        key = (spec.dtype, spec.device)
        if key not in filling:
            filling[key], sizes[key] = [], 0
            buckets.append(filling[key])  # numbered by their first parameters
        filling[key].append(spec.path)
        sizes[key] += spec.numel * spec.dtype.itemsize
        if sizes[key] >= (bucket_bytes if key in full_before else first_bucket_bytes):
            del filling[key]
            full_before.add(key)
    return buckets


def bucket_indices(problem: Problem, buckets: Buckets | None) -> list[list[int]]:
    """The parameters in each bucket, by index.

    Raises:
        ValueError: a path that is no parameter's or stands twice, or an empty bucket.
    """
    if buckets is None:
        buckets = ddp_buckets(problem.specs)
    index = {spec.path: place for place, spec in enumerate(problem.specs)}
    seen: dict[str, int] = {}
    for number, bucket in enumerate(buckets):
        if isinstance(bucket, str) or not bucket:
            raise ValueError(f"bucket {number} must be a list of paths, got {bucket!r}")
        for path in bucket:
            if path not in index:
                raise ValueError(f"bucket {number} names {path!r}, which is no parameter here")
            if path in seen:
                raise ValueError(f"{path!r} stands in buckets {seen[path]} and {number}")
            seen[path] = number
    return [[index[path] for path in bucket] for bucket in buckets]


def completed(problem: Problem, ranks: dict[int, int]) -> Assignment:
    """The parameters that are in no bucket (frozen ones), largest first to the least loaded."""
    held = list(problem.elements)
    for index, rank in ranks.items():
        held[rank] += problem.numels[index]
    rest = [index for index in range(len(problem.specs)) if index not in ranks]
    rest.sort(key=problem.numels.__getitem__, reverse=True)
    found = largest_first(rest, problem.numels, held)
    of_all = [ranks.get(index, found[index]) for index in range(len(problem.specs))]
    return Assignment(whole_pieces(problem.numels, of_all))
