"""Runs of jobs over NCCL, and their results on the ranks that took part."""

from typing import Any

from tests.choices import case
from tests.ranks import Job, run_ranks

EXACT = ("tower", "unused", "mixed dtypes")
"""Cases with bits that do not depend on the order of a sum, as two ranks add in one order."""

SECONDS = 60.0


def outcomes_of(function: Any, cases: list[dict[str, Any]], ranks: int) -> list[Any]:
    """Run a job for each case; return each case with the results of the ranks that took part."""
    jobs = {str(one): Job(function, one, SECONDS) for one in cases}
    found = run_ranks(jobs, ranks=ranks, seconds=2 * SECONDS, fresh=True)
    seen = []
    for one in cases:
        with case(**one):
            results = [outcome.result() for outcome in found[str(one)]]
        seen.append((one, [result for result in results if result is not None]))
    return seen
