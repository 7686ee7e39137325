"""Bound parameters in the order of DDP's buckets: gradients are read where DDP reduces them."""

import pytest

from .conftest import Launched
from .followed import FOLLOWS, run_followed
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


def test_nothing_is_gathered_once_buckets_are_followed(outcomes: Outcomes) -> None:
    for outcome in outcomes["views"]:
        found = outcome.result()
        assert 1 < found["storages"] < 6  # of 12 parameters
        assert found["gathered"] == [1] * FOLLOWS + [0] * (ITERATIONS - FOLLOWS)


def test_gradients_in_memory_of_their_own_are_gathered(outcomes: Outcomes) -> None:
    for outcome in outcomes["copies"]:
        assert outcome.result()["gathered"] == [1] * ITERATIONS
