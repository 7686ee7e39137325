"""Under DDP, on two real processes: every step is by the reduced gradient, on every rank."""

import pytest

from tests.ranks import Job, Outcomes, run_ranks

from . import jobs


def launch() -> Outcomes:
    found: Outcomes = run_ranks(
        {
            **{name: Job(jobs.compare, {"name": name}) for name in jobs.CASES},
            "ignored": Job(jobs.ignored),
            "stacked": Job(jobs.stacked),
            "a forward pass that fails": Job(jobs.forward_that_fails),
            "errors": Job(jobs.errors),
        },
        ranks=2,
        seconds=60,
    )
    return found


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return launch()


@pytest.mark.parametrize("name", [*jobs.CASES, "ignored", "stacked", "a forward pass that fails"])
def test_as_after_backward(outcomes: Outcomes, name: str) -> None:
    for outcome in outcomes[name]:
        assert set(outcome.result().values()) == {True}, outcome.result()


def test_errors(outcomes: Outcomes) -> None:
    for rank, outcome in enumerate(outcomes["errors"]):
        seen = outcome.result()
        for text in seen["taken"]:
            assert "'weight' has an optimizer in backward" in text
            assert "another one" in text and "hooks.step_hook" in text
        assert seen["taken, kept"] == 1
        assert "was not called since it was applied" in seen["between"]
        assert "was not called since it was applied" in seen["too early"]
        assert "was not called before this backward pass" in seen["alone"]
        assert "'0.weight' has an optimizer in backward, but DDP reduces it late" in seen["delayed"]
        for name in (
            "too early, untouched",
            "between, untouched",
            "alone, untouched",
            "with it again",
            "after it",
        ):
            assert seen[name] is True, f"{name}, rank {rank}"
