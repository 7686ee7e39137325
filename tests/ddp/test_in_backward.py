"""Optimizers in backward under DDP, which step by the reduced gradient on every rank."""

from tests.choices import pairs
from tests.ranks import Job, run_ranks

from . import in_backward

CASES = pairs(
    optimizer=list(in_backward.OPTIMIZERS),
    when=["before", "after", "late"],
    views=[False, True],
    graph=list(in_backward.GRAPHS),
    parts=[1, 2],
    own_hook=[True, False],
)
for one in CASES:
    if one["graph"] == "static":
        one["parts"] = 1  # torch fails if the first pass over a static graph is under no_sync


def test_as_after_backward() -> None:
    jobs = {
        "cases": Job(in_backward.compare_all, {"cases": CASES}),
        "ignored": Job(in_backward.ignored),
        "stacked": Job(in_backward.stacked),
    }
    outcomes = run_ranks(jobs, ranks=2, seconds=300)
    one, other = (outcome.result() for outcome in outcomes["cases"])
    assert one == other
    one, other = (outcome.result() for outcome in outcomes["ignored"])
    assert one["rest"] == other["rest"] and one["ignored"] != other["ignored"]
    for outcome in outcomes["stacked"]:
        outcome.result()
