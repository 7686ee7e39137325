"""Optimizers in backward under DDP: every step is by the reduced gradient, on every rank."""

from tests.choices import case
from tests.ranks import Job, run_ranks

from . import in_backward


def test_as_after_backward() -> None:
    jobs = {
        **{name: Job(in_backward.compare, {"name": name}) for name in in_backward.CASES},
        "ignored": Job(in_backward.ignored),
        "stacked": Job(in_backward.stacked),
    }
    for name, outcomes in run_ranks(jobs, ranks=2, seconds=120).items():
        for rank, outcome in enumerate(outcomes):
            with case(name=name, rank=rank):
                assert set(outcome.result().values()) == {True}, outcome.result()
