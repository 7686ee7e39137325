"""``in_order``: what an inner hook launches from callbacks is not overtaken, by DDP neither."""

import pytest

from tests.ranks import Job, Outcomes, run_ranks

from .overtaken import IN_ORDER, run_in_order


def launch() -> Outcomes:
    """Two launches of their own: where ranks get out of step, gloo ends the process."""
    found: Outcomes = {}
    for kind in ("slow", "power"):
        names = [name for name in IN_ORDER if name.startswith(kind)]
        jobs = {name: Job(run_in_order, {"name": name}, group_seconds=10) for name in names}
        found.update(run_ranks(jobs, ranks=2, seconds=60, fresh=True))
    return found


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return launch()


@pytest.mark.parametrize("name", IN_ORDER)
def test_in_order(outcomes: Outcomes, name: str) -> None:
    for outcome in outcomes[name]:
        for number, seen in enumerate(outcome.result()):
            assert seen["differences"] == [], f"iteration {number}"
            assert seen["finite"]
