"""Checkpoints from every storage into every other, between numbers of ranks and policies."""

import itertools
from pathlib import Path

import pytest

from tests.ranks import Job, Outcomes, run_ranks

from . import jobs_storages
from .jobs_storages import STORAGES


def launch(base: Path) -> Outcomes:
    folder = {"folder": str(base)}
    of_class = base / "of a class"
    of_class.mkdir()
    jobs = {
        "save": Job(jobs_storages.saves, folder),
        "elsewhere": Job(jobs_storages.elsewhere, {"folder": str(base / "elsewhere")}),
    }
    found: Outcomes = run_ranks(jobs, ranks=2, seconds=120)
    for ranks in (1, 4):
        jobs = {
            f"load {ranks}": Job(jobs_storages.loads, folder),
            f"torch {ranks}": Job(jobs_storages.plain_torch, folder),
        }
        if ranks == 4:
            jobs["class"] = Job(jobs_storages.from_class, {"folder": str(of_class)})
        found |= run_ranks(jobs, ranks=ranks, seconds=240)
    return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return launch(tmp_path_factory.mktemp("storages"))


@pytest.mark.parametrize("storage", STORAGES)
def test_saved_where_the_twin_is(outcomes: Outcomes, storage: str) -> None:
    for outcome in outcomes["save"]:
        assert outcome.result()[storage] == []


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize(("source", "storage"), list(itertools.product(STORAGES, STORAGES)))
def test_from_any_storage_into_any(
    outcomes: Outcomes, source: str, storage: str, ranks: int
) -> None:
    for outcome in outcomes[f"load {ranks}"]:
        assert outcome.result()[f"{source} > {storage}"] == []


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("storage", STORAGES)
def test_into_torchs_class_and_back(outcomes: Outcomes, storage: str, ranks: int) -> None:
    for outcome in outcomes[f"torch {ranks}"]:
        assert outcome.result()[storage] == []


def test_from_torchs_class(outcomes: Outcomes) -> None:
    for outcome in outcomes["class"]:
        seen = outcome.result()
        assert seen["wrong"] == []
        assert seen["unchanged"] == []
        assert seen["clipped"] == "nothing"  # it keeps no state of its own
        assert "the checkpoint has decoupled weight decay" in seen["other"]
        assert seen["ascends"] == "nothing" and seen["maximize"] is True
        assert (
            "the state dict has trust=True, which this optimizer does not have" in seen["unknown"]
        )


def test_whatever_the_default_device(outcomes: Outcomes) -> None:
    for outcome in outcomes["elsewhere"]:
        assert outcome.result()["wrong"] == []
