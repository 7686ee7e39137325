"""Tests of MatrixOwnerOptimizer checkpoints on other ranks and in one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.ranks import Job, run_ranks

from . import checkpoints

NAMES = [
    *("muon", "soap", "shampoo", "lamb", "clipped", "accumulated", "finite, clipped", "averaged"),
    *("overridden", "frozen part", "noise", "8 bits", "prodigy, sliced", "pointwise"),
]


def on_ranks(count: int, function: Callable[..., Any], **arguments: object) -> None:
    jobs = {"job": Job(function, arguments)}
    for outcome in run_ranks(jobs, ranks=count, seconds=200)["job"]:
        outcome.result()


def test_on_fewer_ranks_in_one_process_and_on_more_ranks_again(tmp_path: Path) -> None:
    """A run continues on 4 ranks, 2 ranks, one process, and 2 replicas of 2 shards."""
    folders = [str(tmp_path / str(number)) for number in range(5)]
    on_ranks(4, checkpoints.saves, names=NAMES, folder=folders[0])
    route = (
        (2, checkpoints.passes_on, {}),
        (1, checkpoints.passes_on_alone, {}),
        (4, checkpoints.passes_on, {"copies": 2}),
    )
    begins = checkpoints.BEFORE
    for number, (ranks, function, options) in enumerate(route):
        where = {"folder": folders[number], "to": folders[number + 1], "begins": begins + number}
        on_ranks(ranks, function, names=NAMES, **where, **options)
    last = {"folder": folders[3], "begins": begins + 3}
    on_ranks(4, checkpoints.on_subgroup, names=["muon", "clipped"], **last)


def test_state_of_a_matrix_that_was_frozen_is_loaded(tmp_path: Path) -> None:
    on_ranks(2, checkpoints.thaws, folder=str(tmp_path))


def test_in_the_background(tmp_path: Path) -> None:
    on_ranks(2, checkpoints.in_the_background, folder=str(tmp_path / "saved"))


def test_8_bit_state_of_owners_is_loaded_as_values(tmp_path: Path) -> None:
    on_ranks(2, checkpoints.saves, names=["8 bits"], folder=str(tmp_path))
    on_ranks(1, checkpoints.loads_values_alone, folder=str(tmp_path))
