"""Tests of how opened files and sent bytes grow with the number of ranks."""

import os
import pickle
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from sharding.storage import reader
from tests.checkpoints import write_parts

from . import worlds

WORLDS = (4, 16, 64)
SPECS = worlds.specs_of(40, 96)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Return a checkpoint for each number of ranks."""
    found = {}
    for size in WORLDS:
        found[size] = tmp_path_factory.mktemp("saved")
        write_parts(worlds.parts_of(size, SPECS, None), found[size])
    return found


@contextmanager
def opened_files() -> Iterator[Counter[str]]:
    """Count the files that are opened in the block, by kind."""
    found: Counter[str] = Counter()
    real = os.open

    def counted(path: Any, *arguments: Any, **options: Any) -> int:
        name = Path(path).name
        found["data" if name.endswith(".distcp") else name.partition("-")[0]] += 1
        return real(path, *arguments, **options)

    with mock.patch.object(os, "open", counted):
        yield found


def test_one_process_opens_one_metadata_file(saved: dict[int, Path]) -> None:
    """Each data file is opened twice: once to check it, and once to read it."""
    for size, folder in saved.items():
        parts = worlds.parts_of(1, SPECS, -1.0)
        with opened_files() as seen:
            worlds.load_parts(parts, folder)
        worlds.check_numbers(parts)
        assert seen == {".metadata": 1, "checksums": 1, "data": 2 * size}


def test_each_rank_opens_one_metadata_file_and_its_share_of_the_rest(
    saved: dict[int, Path],
) -> None:
    """The number of ranks that load may be equal, four times as large, or a quarter."""
    for source, target in ((4, 4), (16, 16), (64, 64), (64, 16), (16, 64)):
        parts = worlds.parts_of(target, SPECS, -1.0)
        with opened_files() as seen:
            worlds.load_parts(parts, saved[source])
        worlds.check_numbers(parts)
        assert seen[".metadata"] == seen["checksums"] == target
        # Each file is checked once. A rank reads the files with its ranges, the files with the step
        # counts of its parameters, and one file for the options.
        assert seen["data"] <= source + 4 * max(source, target)


def test_each_file_is_checked_by_one_rank(
    saved: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: Counter[str] = Counter()
    monkeypatch.setattr(reader, "check_file", lambda path, wanted: checked.update([path.name]))
    for source, target in ((16, 4), (4, 16)):
        checked.clear()
        worlds.load_parts(worlds.parts_of(target, SPECS, -1.0), saved[source])
        assert checked == dict.fromkeys([one.name for one in saved[source].glob("*.distcp")], 1)


def test_plans_and_metadata_grow_with_the_ranks_and_not_with_their_square(
    saved: dict[int, Path],
) -> None:
    """Each rank sends only its own plan to the first rank, so bytes do not grow quadratically."""
    sent, kept = {}, {}
    for size, folder in saved.items():
        plans = []
        for rank, part in enumerate(worlds.parts_of(size, SPECS, None)):
            planner = DefaultSavePlanner()
            planner.set_up_planner(part, None, rank == 0)
            plans.append(planner.create_local_plan())
        sent[size] = sum(len(pickle.dumps(one)) for one in plans)
        kept[size] = (folder / ".metadata").stat().st_size
    for bytes_of in (sent, kept):
        assert bytes_of[64] < 4 * bytes_of[16] < 16 * bytes_of[4]
