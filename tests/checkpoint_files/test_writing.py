"""Tests of saves on failing disks: the last checkpoint survives, and the next save works."""

import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from sharding.storage import ChecksumWriter
from sharding.storage.files import DurableFiles

from . import disks, runs

FILES = runs.RANKS + 2
"""Number of files in a checkpoint: one per rank, the checksums, and the metadata."""
STRANGERS = [
    *("notes.txt", "model.distcp", "checksums.json", "__0a1b2c3d_0_0.distcp.bak"),
    *("__0A1B2C3D_0_0.distcp", "checksums-0a1b2c3.json", ".metadata.old", "x__0_0.distcp"),
]
LEFT = [
    *("__0a1b2c3d_0_0.distcp", "__0_7.distcp", "checksums-0a1b2c3d.json", ".metadata.tmp"),
]


def test_torchs_own_reader_loads_it(tmp_path: Path) -> None:
    runs.save(tmp_path, 1)
    state = runs.load(tmp_path, dcp.FileSystemReader(tmp_path))
    assert runs.same(state["w"], torch.arange(12.0).view(3, 4) + 100)
    assert len(runs.files_of(tmp_path)) == FILES


def test_a_file_size_limit_is_an_error(tmp_path: Path) -> None:
    """The first write over the limit is short, and only the next write fails."""
    runs.save(tmp_path, 1)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, hard))
    try:
        with pytest.raises(OSError, match=r"File too large: '.*\.distcp'"):
            runs.save(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("forever", [False, True])
def test_a_full_disk(tmp_path: Path, forever: bool) -> None:
    """After a failure at any operation, the folder has one complete checkpoint."""
    for at in range(100):
        folder = tmp_path / str(at)
        runs.save(folder, 1)
        (folder / "notes.txt").write_text("of someone else")
        try:
            runs.save(folder, 2, disks.full(at, forever=forever))
        except OSError:
            assert runs.version_of(folder) in (1, 2)
        else:
            assert runs.version_of(folder) == 2
            break
        runs.save(folder, 3)
        assert runs.version_of(folder) == 3
        assert len(runs.files_of(folder)) == FILES + 1
    assert at > 15


def test_a_killed_process(tmp_path: Path) -> None:
    """After a kill at any operation, one checkpoint is complete; the next save removes the rest."""
    for at in range(100):
        folder = tmp_path / str(at)
        runs.save(folder, 1)
        child = os.fork()
        if child == 0:
            try:
                runs.save(folder, 2, disks.killing(at))
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        assert runs.version_of(folder) in (1, 2)
        if not os.WIFSIGNALED(status):
            assert runs.version_of(folder) == 2
            break
        runs.save(folder, 3)
        assert runs.version_of(folder) == 3
        assert len(runs.files_of(folder)) == FILES
    assert at > 15


def test_a_first_save_that_is_killed_leaves_no_checkpoint(tmp_path: Path) -> None:
    """Repeated kills leave the files of one save at most."""
    for _ in range(3):
        child = os.fork()
        if child == 0:
            try:
                runs.save(tmp_path / "new", 1, disks.killing(0, "rename"))
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status)
        with pytest.raises(dcp.CheckpointException, match="no checkpoint was completed there"):
            runs.load(tmp_path / "new")
        assert len(runs.files_of(tmp_path / "new")) == FILES
    runs.save(tmp_path / "new", 2)
    assert runs.version_of(tmp_path / "new") == 2
    assert len(runs.files_of(tmp_path / "new")) == FILES


def test_strangers_files_stay(tmp_path: Path) -> None:
    """A save removes only names that saves create, and removes links without their targets."""
    for name in (*STRANGERS, *LEFT):
        (tmp_path / name).write_text(name)
    (tmp_path / "__0a1b2c3d_2_0.distcp").mkdir()
    outside = tmp_path / "precious"
    outside.write_text("precious")
    (tmp_path / "__0a1b2c3d_3_0.distcp").symlink_to(outside)
    for version in (1, 2):
        runs.save(tmp_path, version)
        names = set(runs.files_of(tmp_path))
        assert names > {*STRANGERS, "__0a1b2c3d_2_0.distcp", "precious"}
        assert len(names) == len(STRANGERS) + 2 + FILES
    assert outside.read_text() == "precious"
    assert all((tmp_path / name).read_text() == name for name in STRANGERS)


def test_a_planted_link_is_not_written_through(tmp_path: Path) -> None:
    """A link at the temporary name of the metadata is replaced, not followed."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / ".metadata.tmp").symlink_to(victim)
    runs.save(folder, 1)
    assert victim.read_text() == "precious" and runs.version_of(folder) == 1


def test_a_checkpoint_of_torchs_own_writer_is_replaced(tmp_path: Path) -> None:
    """A checkpoint without checksums stays until the new one is complete."""
    state = runs.load(tmp_path / "ours") if (tmp_path / "ours").exists() else {"b": torch.ones(())}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save(state, checkpoint_id=tmp_path / "saved")
    before = runs.files_of(tmp_path / "saved")
    with pytest.raises(OSError, match="No space"):
        runs.save(tmp_path / "saved", 1, disks.full(0, forever=True))
    assert set(before) <= set(runs.files_of(tmp_path / "saved"))
    runs.save(tmp_path / "saved", 1)
    assert runs.version_of(tmp_path / "saved") == 1
    assert len(runs.files_of(tmp_path / "saved")) == FILES


Stays = Callable[[int, list[disks.Name]], bool]
STAYS: dict[str, Stays] = {
    "nothing": lambda number, change: False,
    "everything": lambda number, change: True,
    "removals": lambda number, change: all(to is None for _, to in change),
    "additions": lambda number, change: any(to is not None for _, to in change),
    "every other": lambda number, change: number % 2 == 0,
    "the others": lambda number, change: number % 2 == 1,
}


@pytest.mark.parametrize("stays", STAYS)
def test_power_is_lost(tmp_path: Path, stays: str) -> None:
    """After a loss of power before any operation, one of two checkpoints is complete."""
    part = b"half" if stays in ("everything", "additions", "the others") else b""
    runs.save(tmp_path / "first", 1)
    for at in range(100):
        folder, left = tmp_path / f"{at}", tmp_path / f"{at} left"
        shutil.copytree(tmp_path / "first", folder)
        disk = disks.PowerDisk(folder, at)
        try:
            runs.save(folder, 2, disk)
        except disks.PowerLossError:
            disk.left(left, STAYS[stays], part)
            assert runs.version_of(left) in (1, 2)
        else:
            disk.left(left, STAYS[stays], part)
            assert runs.version_of(left) == 2  # a save that has returned is durable
            break
        runs.save(left, 3)  # the next save works
        assert runs.version_of(left) == 3 and len(runs.files_of(left)) == FILES
    assert at > 15


class SyncedFolders(DurableFiles):
    """Disk that records which folders were synced."""

    def __init__(self) -> None:
        super().__init__()
        self.synced: list[Path] = []

    def sync_folder(self, folder: object) -> None:
        self.synced.append(Path(str(folder)))
        super().sync_folder(str(folder))


def test_new_folders_are_durable(tmp_path: Path) -> None:
    """The parent of each new folder is synced."""
    disk = SyncedFolders()
    runs.save(tmp_path / "a" / "b" / "c", 1, disk)
    assert disk.synced[:3] == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]
    assert set(disk.synced[3:]) == {tmp_path / "a" / "b" / "c"}


def test_the_order_of_a_save(tmp_path: Path) -> None:
    """Bytes and names are synced before the metadata is renamed; old files are removed last."""
    runs.save(tmp_path, 1)
    names: list[str] = []
    runs.save(tmp_path, 2, disks.CountingDisk(lambda _, name: names.append(name)))
    of_a_file = ["create", "write", "sync"]
    of_a_rank = [*of_a_file, "sync_folder"]
    commit = [*of_a_file * 2, "sync_folder", "rename", "sync_folder"]
    assert names == [*of_a_rank * runs.RANKS, *commit, *["remove"] * (runs.RANKS + 1)]


@pytest.mark.parametrize("how", ["shorter", "gone"])
def test_what_the_first_rank_does_not_see_is_not_committed(tmp_path: Path, how: str) -> None:
    """A file that the first rank cannot see, such as one on a local disk, prevents the commit."""
    runs.save(tmp_path, 1)
    there = set(tmp_path.iterdir())

    class Forgetful(DurableFiles):
        def sync_folder(self, folder: object) -> None:
            super().sync_folder(str(folder))
            for path in {*tmp_path.glob("*.distcp")} - there:
                if how == "gone":
                    path.unlink()
                else:
                    path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(OSError, match="a folder that all ranks see"):
        runs.save(tmp_path, 2, Forgetful())
    assert runs.version_of(tmp_path) == 1
    runs.save(tmp_path, 3)
    assert runs.version_of(tmp_path) == 3 and len(runs.files_of(tmp_path)) == FILES


def test_metadata_of_one_rank_each_is_refused(tmp_path: Path) -> None:
    """Without collectives no rank knows all files, so no rank can check them."""
    (first, *_) = runs.writers(tmp_path / "saved")
    with pytest.raises(ValueError, match="use_collectives=False; save with use_collectives=True"):
        first.set_up_storage_writer(True, rank=0, use_collectives=False)
    assert not (tmp_path / "saved").exists()


def test_a_writer_saves_more_than_once(tmp_path: Path) -> None:
    """Each save uses new names, so that the previous checkpoint stays complete until the end."""
    writers = [ChecksumWriter(tmp_path, thread_count=2) for _ in range(runs.RANKS)]
    names = []
    for version in (1, 2):
        parts = [runs.part(rank, version) for rank in range(runs.RANKS)]
        runs.write_parts(parts, tmp_path, writers)
        assert runs.version_of(tmp_path) == version
        names.append(set(runs.files_of(tmp_path)))
    assert names[0] & names[1] == {".metadata"}
