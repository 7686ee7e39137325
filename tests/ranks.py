"""Jobs on several real processes: one pool of ranks for all tests of a run."""

import atexit
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from sharding.testing import Outcome, RankPool

POOL = RankPool()
atexit.register(POOL.close)


class Job(NamedTuple):
    """A function that is called on every rank."""

    function: Callable[..., Any]
    """Defined at the top level of a module; returns what JSON can hold."""
    arguments: Mapping[str, Any] = {}
    group_seconds: float = 30.0
    """After how long without the others a collective is an error."""


Outcomes = dict[str, list[Outcome]]
"""By the name of the job, one per rank."""


def run_ranks(
    jobs: Mapping[str, Job],
    *,
    ranks: int,
    seconds: float,
    fresh: bool = False,
) -> Outcomes:
    """Run the jobs, one after the other, on as many processes as there are ranks.

    Args:
        jobs: by name.
        ranks: how many processes.
        seconds: for how long no rank may go on within a job, before all are killed; such a job has
            outcomes that say which rank was where.
        fresh: on processes that nobody used before, and nobody uses afterwards, forked off one
            that has imported torch: for jobs that kill ranks, or change what others would see.
    """
    if fresh:
        with RankPool(start="forkserver") as pool:
            return _run(pool, jobs, ranks, seconds)
    return _run(POOL, jobs, ranks, seconds)


def _run(pool: RankPool, jobs: Mapping[str, Job], ranks: int, seconds: float) -> Outcomes:
    found = {}
    for name, job in jobs.items():
        outcomes = pool.run(
            job.function,
            job.arguments,
            ranks=ranks,
            silent_seconds=seconds,
            group_seconds=job.group_seconds,
            grace_seconds=120.0,
        )
        found[name] = [one._replace(value=json.loads(json.dumps(one.value))) for one in outcomes]
    return found
