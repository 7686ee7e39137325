"""What goes wrong with torch's ZeroRedundancyOptimizer under overlap, one test each: not here.

Each was seen with torch 2.13. On four ranks, each with data of its own, over gloo, which torch's
hooks refuse.
"""

from typing import Any

import pytest

from . import scenarios
from .cases import run_case
from .harness import Job, Launched, Outcomes, run_ranks

HOOKS = ("scatter", "held", "interleaved")
COMPARED = ("tower", "all used", "learning rates", "two groups", "mixed dtypes")


@pytest.fixture(scope="module")
def outcomes(launched: Launched) -> Outcomes:
    jobs = {
        **{
            f"{name}, {kind}": Job(run_case, {"name": f"{name}, {kind}"})
            for name in COMPARED
            for kind in HOOKS
        },
        **{
            f"subgroup, {kind}": Job(scenarios.on_subgroup, {"name": f"tower, {kind}"})
            for kind in HOOKS
        },
        "saved": Job(scenarios.saved_under_overlap),
        "without pickles": Job(scenarios.without_pickles),
        "bytes": Job(scenarios.bytes_sent, {"policy": "greedy", "cap": 25}),
    }
    return launched("zero_torch_faults", lambda: run_ranks(jobs, ranks=4, seconds=90))


def results(outcomes: Outcomes, job: str) -> list[Any]:
    return [outcome.result() for outcome in outcomes[job]]


def equal_to_one_process(ranks: list[Any]) -> None:
    for seen in ranks:
        assert not any(seen["differences"])
    assert len({seen["digest"] for seen in ranks}) == 1


@pytest.mark.parametrize("kind", HOOKS)
def test_first_iterations_update(outcomes: Outcomes, kind: str) -> None:
    """torch: the first two or three change nothing, silently."""
    for seen in results(outcomes, f"tower, {kind}"):
        assert seen["moved"] == [12, 12, 12, 12]


@pytest.mark.parametrize("kind", HOOKS)
def test_find_unused_parameters_updates(outcomes: Outcomes, kind: str) -> None:
    """torch: no iteration ever changes anything, silently."""
    for seen in results(outcomes, f"all used, {kind}"):
        assert seen["moved"] == [12, 12, 12, 12]


@pytest.mark.parametrize("kind", HOOKS)
def test_each_rank_of_a_subgroup_updates(outcomes: Outcomes, kind: str) -> None:
    """torch: one of them never does, silently."""
    _, one, _, three = results(outcomes, f"subgroup, {kind}")
    equal_to_one_process([one, three])
    assert one["moved"] == three["moved"] == [12, 12, 12, 12]


@pytest.mark.parametrize("kind", HOOKS)
def test_learning_rates_are_read_at_each_step(outcomes: Outcomes, kind: str) -> None:
    """torch: those of the construction hold forever."""
    equal_to_one_process(results(outcomes, f"learning rates, {kind}"))


@pytest.mark.parametrize("kind", HOOKS)
def test_several_groups(outcomes: Outcomes, kind: str) -> None:
    """torch: an assertion fails inside the third backward pass."""
    equal_to_one_process(results(outcomes, f"two groups, {kind}"))


@pytest.mark.parametrize("kind", HOOKS)
def test_mixed_dtypes(outcomes: Outcomes, kind: str) -> None:
    """torch refuses them."""
    equal_to_one_process(results(outcomes, f"mixed dtypes, {kind}"))


def test_checkpoints(outcomes: Outcomes) -> None:
    """torch can neither save nor load under overlap; without, it empties the caller's dict."""
    for seen in results(outcomes, "saved"):
        assert seen["differences"] == []
        assert seen["went on"] and seen["untouched"]


def test_no_pickles_between_ranks(outcomes: Outcomes) -> None:
    """torch broadcasts pickled state from each rank to each."""
    assert results(outcomes, "without pickles") == [12] * 4


def test_no_more_bytes_than_an_all_reduce(outcomes: Outcomes) -> None:
    """torch reduces all gradients to all ranks, and then broadcasts parameters one by one."""
    for seen in results(outcomes, "bytes"):
        assert seen["sent"] == [seen["all_reduce"]] * 3
