"""Jobs on several processes, with one pool of ranks for all tests of a run."""

import atexit
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from sharding.testing import Outcome, RankPool

POOL = RankPool()
atexit.register(POOL.close)


class Job(NamedTuple):
    """Function to be called on every rank."""

    function: Callable[..., Any]
    """The function, defined at the top level of a module; its result must be valid JSON."""
    arguments: Mapping[str, Any] = {}
    group_seconds: float = 30.0
    """The timeout of collectives in seconds."""


Outcomes = dict[str, list[Outcome]]
"""Outcomes of each rank, by the name of the job."""


def run_ranks(
    jobs: Mapping[str, Job],
    *,
    ranks: int,
    seconds: float,
    fresh: bool = False,
) -> Outcomes:
    """Run the jobs one after another, each on all ranks.

    Args:
        jobs: the jobs, by name.
        ranks: the number of processes.
        seconds: the time without progress after which all ranks are killed; the outcomes then
            say where each rank was.
        fresh: True for new processes that no other job uses, forked from one that has imported
            torch: for jobs that kill ranks, or change global state.
    """
    if fresh:
        with RankPool(start="forkserver") as pool:
            return _run(pool, jobs, ranks, seconds)
    return _run(POOL, jobs, ranks, seconds)


def run_at_once(jobs: Mapping[str, Job], *, ranks: int, seconds: float) -> Outcomes:
    """Run all jobs at the same time, each on new processes: for jobs that wait for a timeout."""

    def run(name: str) -> Outcomes:
        return run_ranks({name: jobs[name]}, ranks=ranks, seconds=seconds, fresh=True)

    with ThreadPoolExecutor(len(jobs)) as threads:
        return {name: found[name] for name, found in zip(jobs, threads.map(run, jobs), strict=True)}


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
