"""Checkpoints between numbers of ranks and policies."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import Job, Outcomes, run_ranks

from . import jobs_more

CASES = {
    "adam": (("elements", True), ("greedy", False)),
    "damped": (("greedy", False), ("elements", True)),
    "adagrad": (("elements", False), ("elements", True)),
}


def folders(base: Path) -> Iterator[tuple[str, str]]:
    for name in CASES:
        folder = base / name
        folder.mkdir(exist_ok=True)
        yield name, str(folder)


def of(name: str, folder: str, which: int) -> dict[str, Any]:
    policy, views = CASES[name][which]
    return {"folder": folder, "name": name, "policy": policy, "views": views}


def launch(base: Path) -> Outcomes:
    every = dict(folders(base))
    found: Outcomes = run_ranks(
        {f"save {n}": Job(jobs_more.saves, of(n, folder, 0)) for n, folder in every.items()},
        ranks=4,
        seconds=60,
    )
    for ranks in (1, 2):
        found |= run_ranks(
            {
                f"load {n} {ranks}": Job(jobs_more.goes_on, of(n, folder, 1))
                for n, folder in every.items()
            },
            ranks=ranks,
            seconds=60,
        )
    refused = base / "refused"
    refused.mkdir(exist_ok=True)
    jobs = {"refuses": Job(jobs_more.refuses, {"folder": str(refused)})}
    return found | run_ranks(jobs, ranks=2, seconds=60)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return launch(tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize("name", CASES)
def test_saved_by_four_ranks(outcomes: Outcomes, name: str) -> None:
    seen = [outcome.result() for outcome in outcomes[f"save {name}"]]
    for one in seen:
        assert one["wrong"] == []
        assert one["pickles"] == []
        # Of the two checkpoints, the last is left: a file of bytes and one of JSON for each rank.
        assert one["files"].count(".bin") == 4 and one["files"].count(".json") == 5


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_loaded_by_others(outcomes: Outcomes, name: str, ranks: int) -> None:
    saved = outcomes[f"save {name}"][0].result()
    for outcome in outcomes[f"load {name} {ranks}"]:
        seen = outcome.result()
        assert seen["lr"] == 0.25
        assert seen["same"] == [] and seen["plain"] == [] and seen["wrong"] == []
        assert seen["digest"] == saved["digest"]  # as if it had never stopped


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("none", "FileNotFoundError"),
        ("missing", "it lacks 'new'"),
        ("extra", "it has 'unused.bias', which this optimizer has not"),
        ("groups", "groups of [5, 5] parameters, this optimizer of [10]"),
        ("class", "this optimizer keeps step, sum"),
        ("options", "decoupled_weight_decay is True for AdamW, and cannot be False"),
        ("damaged", "it was damaged"),
    ],
)
def test_what_does_not_fit_is_named(outcomes: Outcomes, what: str, told: str) -> None:
    for outcome in outcomes["refuses"]:
        seen = outcome.result()
        assert told in seen[what]
        assert seen["unchanged"] == []


def test_a_rank_that_cannot_write_is_named(outcomes: Outcomes) -> None:
    for outcome in outcomes["refuses"]:
        assert "Error" in outcome.result()["blocked"]
