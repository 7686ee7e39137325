"""Bit for bit what one process makes of all ranks' data, from the first iteration on."""

import pytest

from tests.ranks import Job, Outcomes, run_ranks

from .cases import CASES, run_case


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    jobs = {name: Job(run_case, {"name": name}) for name in CASES}
    return run_ranks(jobs, ranks=2, seconds=60)


@pytest.mark.parametrize("name", CASES)
def test_equal_to_one_process(outcomes: Outcomes, name: str) -> None:
    ranks = [outcome.result() for outcome in outcomes[name]]
    for seen in ranks:
        assert all(names == [] for names in seen["differences"]), seen["differences"]
        assert seen["moved"] and all(seen["moved"])
        assert seen["finite"]
    assert len({seen["digest"] for seen in ranks}) == 1


@pytest.mark.parametrize("name", CASES)
def test_forward_sees_whole_parameters(outcomes: Outcomes, name: str) -> None:
    """Also where gathers were on their way when it began: losses are those of one process."""
    for outcome in outcomes[name]:
        assert all(outcome.result()["losses"])
