"""Tests that a TorchOptimizer in one process and ZeRO on several ranks continue each other."""

from pathlib import Path

import pytest

from tests.ranks import Job, Outcomes, run_ranks

from . import laws, single_process
from .runs import folder_of

TUPLE = "a schedule in a tuple"


@pytest.fixture(scope="module")
def on_three(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcomes]:
    base = tmp_path_factory.mktemp("single")
    jobs = {
        name: Job(laws.saves, {"name": name, "policy": "elements", "folder": folder_of(base, name)})
        for name in single_process.NAMES
    }
    values = Job(single_process.scheduled_values_saved, {"folder": folder_of(base, TUPLE)})
    return base, run_ranks({**jobs, TUPLE: values}, ranks=3, seconds=90)


@pytest.fixture(scope="module")
def on_one(on_three: tuple[Path, Outcomes]) -> Outcomes:
    base, _ = on_three
    jobs = {
        name: Job(single_process.goes_on, {"name": name, "folder": folder_of(base, name)})
        for name in single_process.NAMES
    }
    once = {
        TUPLE: Job(single_process.scheduled_values_loaded, {"folder": folder_of(base, TUPLE)}),
        "number": Job(
            single_process.a_number_loads_no_schedule, {"folder": folder_of(base, "schedule")}
        ),
    }
    return run_ranks({**jobs, **once}, ranks=1, seconds=90)


@pytest.fixture(scope="module")
def on_two(on_three: tuple[Path, Outcomes], on_one: Outcomes) -> Outcomes:
    base, _ = on_three
    jobs = {
        name: Job(
            single_process.goes_back,
            {"name": name, "policy": "greedy", "folder": folder_of(base, name)},
        )
        for name in single_process.NAMES
    }
    return run_ranks(jobs, ranks=2, seconds=90)


@pytest.mark.parametrize("name", single_process.NAMES)
def test_from_ranks_to_one_process_and_back(
    on_three: tuple[Path, Outcomes], on_one: Outcomes, on_two: Outcomes, name: str
) -> None:
    """State and parameters equal those of ZeRO's run bit for bit, with schedules and in 8 bits."""
    for outcome in on_three[1][name]:
        outcome.result()
    assert [outcome.result() for outcome in on_one[name]] == [[]]
    assert [outcome.result() for outcome in on_two[name]] == [[], []]


def test_a_schedule_in_a_tuple(on_three: tuple[Path, Outcomes], on_one: Outcomes) -> None:
    for outcome in on_three[1][TUPLE]:
        outcome.result()
    assert [outcome.result() for outcome in on_one[TUPLE]] == [[]]


def test_a_number_is_not_loaded_from_a_schedule(
    on_three: tuple[Path, Outcomes], on_one: Outcomes
) -> None:
    (outcome,) = on_one["number"]
    assert "Missing key in checkpoint state_dict: optim.param_groups.0.lr" in outcome.result()
