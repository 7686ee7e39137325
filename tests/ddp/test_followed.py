"""Bound parameters in the order of DDP's buckets: gradients are read where DDP reduces them."""

import pytest

from .conftest import Launched
from .followed import run_followed
from .processes import Job, Outcomes, run_ranks

ITERATIONS = 5


@pytest.fixture(scope="module")
def outcomes(launched: Launched) -> Outcomes:
    jobs = {
        name: Job(run_followed, {"views": name == "views", "iterations": ITERATIONS})
        for name in ("views", "copies")
    }
    return launched("followed", lambda: run_ranks(jobs, ranks=2, seconds=60))


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
