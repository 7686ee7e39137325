"""Bound parameters in the order of DDP's buckets: gradients are read where DDP reduces them."""

import pytest

from tests.ranks import Job, Outcomes, run_ranks

from .followed import run_followed

ITERATIONS = 5


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    jobs = {
        name: Job(run_followed, {"views": name == "views", "iterations": ITERATIONS})
        for name in ("views", "copies")
    }
    return run_ranks(jobs, ranks=2, seconds=60)


@pytest.mark.parametrize("name", ["views", "copies"])
def test_equal_to_torch_optim(outcomes: Outcomes, name: str) -> None:
    for outcome in outcomes[name]:
        assert outcome.result()["equal"] == [True] * ITERATIONS


def test_buckets_are_what_they_are_followed_for(outcomes: Outcomes) -> None:
    for outcome in outcomes["views"]:
        assert 1 < outcome.result()["storages"] < 6  # of 12 parameters


@pytest.mark.parametrize("name", ["views", "copies"])
def test_nothing_is_gathered(outcomes: Outcomes, name: str) -> None:
    for outcome in outcomes[name]:
        assert outcome.result()["gathered"] == [0] * ITERATIONS
