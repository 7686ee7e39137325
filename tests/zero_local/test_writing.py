"""Saving on disks that fail: the checkpoint before stays, and nothing is left lying."""

import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sharding import read_state_dict
from sharding.zero.checkpoint import save
from sharding.zero.disk import Disk, LocalDisk

from . import disks, saved

STRANGERS = [
    *("notes.txt", "model.bin", "plan.json", "0a1b2c3d-00000.bin.bak", "0A1B2C3D-00000.bin"),
    *("0a1b2c3d.json", "0a1b2c3d-0.bin", "checkpoint.json.old", "x0a1b2c3d-00000.bin"),
]
LEFT = ["0a1b2c3d-00000.bin", "0a1b2c3d-00001.json", "0a1b2c3d-00001.part", "checkpoint.part"]


def is_of(folder: Path, zero: Any) -> bool:
    """Whether the checkpoint in a folder is of the state that an optimizer has."""
    return saved.same(read_state_dict(folder)["state"], saved.state_of(zero)["state"])


def save_on(disk: Disk, zero: Any, folder: Path) -> None:
    save(zero._parts, folder, disk)


def test_a_file_size_limit_is_an_error(tmp_path: Path) -> None:
    """Of the system: the first write over it is short, and only the next one fails."""
    param = nn.Parameter(torch.zeros(4096))
    zero = saved.sharded([("w", param)])
    param.grad = torch.ones(4096)
    zero.step()
    zero.save(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    zero.step()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))
    try:
        with pytest.raises(OSError, match=r"File too large: '.*\.bin'"):
            zero.save(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_short_writes_go_on(tmp_path: Path) -> None:
    """Until all is written."""
    zero = saved.made(2)
    for most in (1, 3, 100):
        save_on(disks.ShortDisk(most), zero, tmp_path)
        assert is_of(tmp_path, zero)


def test_writes_of_nothing_are_an_error(tmp_path: Path) -> None:
    """And no endless loop."""
    with pytest.raises(OSError, match="a write wrote nothing"):
        save_on(disks.DeafDisk(), saved.made(2), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("forever", [False, True])
def test_a_full_disk(tmp_path: Path, forever: bool) -> None:
    """At each operation: what failed leaves nothing, or is whole."""
    before, after = saved.made(1), saved.made(3)
    for at in range(100):
        folder = tmp_path / str(at)
        before.save(folder)
        (folder / "notes.txt").write_text("of someone else")
        files = sorted(folder.iterdir())
        disk = disks.full(at, forever=forever)
        try:
            save_on(disk, after, folder)
        except OSError:
            assert is_of(folder, before) or is_of(folder, after)
        else:
            assert is_of(folder, after)
            break
        if is_of(folder, before):
            assert sorted(folder.iterdir()) == files
        after.save(folder)
        assert is_of(folder, after) and len(list(folder.iterdir())) == 4
    assert at > 10


def test_what_a_killed_save_has_left_is_removed_by_the_next(tmp_path: Path) -> None:
    """At whatever operation it was killed."""
    before, after = saved.made(1), saved.made(3)
    for at in range(100):
        folder = tmp_path / str(at)
        before.save(folder)
        try:
            save_on(disks.killed(at), after, folder)
        except disks.PowerLossError:
            assert is_of(folder, before) or is_of(folder, after)
        else:
            break
        after.save(folder)
        assert is_of(folder, after) and len(list(folder.iterdir())) == 3
    assert at > 10


def test_what_was_killed_many_times_does_not_pile_up(tmp_path: Path) -> None:
    """A first save that is killed again and again leaves files of one save at most."""
    zero = saved.made(1)
    for _ in range(5):
        with pytest.raises(disks.PowerLossError):
            save_on(disks.killed(9), zero, tmp_path / "new")
    assert len(list((tmp_path / "new").iterdir())) <= 3
    zero.save(tmp_path / "new")
    assert len(list((tmp_path / "new").iterdir())) == 3


def test_strangers_files_stay(tmp_path: Path) -> None:
    """Only names that saves give are removed; links, not what they lead to."""
    for name in (*STRANGERS, *LEFT):
        (tmp_path / name).write_text(name)
    (tmp_path / "0a1b2c3d-00002.bin").mkdir()
    outside = tmp_path / "precious"
    outside.write_text("precious")
    (tmp_path / "0a1b2c3d-00003.bin").symlink_to(outside)
    zero = saved.made(1)
    for _ in range(2):
        zero.save(tmp_path)
        names = {path.name for path in tmp_path.iterdir()}
        assert names > {*STRANGERS, "0a1b2c3d-00002.bin", "precious"}
        assert len(names) == len(STRANGERS) + 2 + 3
    assert outside.read_text() == "precious"
    assert all((tmp_path / name).read_text() == name for name in STRANGERS)


def test_a_planted_link_is_not_written_through(tmp_path: Path) -> None:
    """Not under the name that the manifest is first written to."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "checkpoint.part").symlink_to(victim)
    zero = saved.made(1)
    zero.save(folder)
    assert victim.read_text() == "precious" and is_of(folder, zero)


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
    """Before each operation, and after the last one: one of two checkpoints is whole."""
    share = 0.5 if stays in ("everything", "additions", "the others") else 0.0
    before, after = saved.made(1), saved.made(3)
    before.save(tmp_path / "first")
    for at in range(100):
        folder, left = tmp_path / f"{at}", tmp_path / f"{at} left"
        shutil.copytree(tmp_path / "first", folder)
        disk = disks.PowerDisk(folder, at)
        try:
            save_on(disk, after, folder)
        except disks.PowerLossError:
            disk.left(left, STAYS[stays], share)
            assert is_of(left, before) or is_of(left, after)
        else:
            disk.left(left, STAYS[stays], share)
            assert is_of(left, after)  # what save() has returned from is durable
            break
        before.save(left)  # and the next save finds its way
        assert is_of(left, before) and len(list(left.iterdir())) == 3
    assert at > 10


class SyncedFolders(LocalDisk):
    """Notes which folders were synced."""

    def __init__(self) -> None:
        self.synced: list[Path] = []

    def sync_folder(self, folder: Path) -> None:
        self.synced.append(folder)
        super().sync_folder(folder)


def test_new_folders_are_durable(tmp_path: Path) -> None:
    """Each new one is synced into the one that it is in."""
    disk = SyncedFolders()
    save_on(disk, saved.made(1), tmp_path / "a" / "b" / "c")
    assert disk.synced[:3] == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]
    assert set(disk.synced[3:]) == {tmp_path / "a" / "b" / "c"}


def test_the_order_of_a_save(tmp_path: Path) -> None:
    """Bytes and names are synced before the manifest is there; old files go last."""
    saved.made(1).save(tmp_path)
    names: list[str] = []
    save_on(disks.CountingDisk(lambda _, name: names.append(name)), saved.made(2), tmp_path)
    order = [name for name in names if name != "write"]
    shard = ["create", "sync", "create", "sync", "sync_folder"]
    manifest = ["create", "sync", "replace", "sync_folder"]
    assert order == [*shard, *manifest, "unlink", "unlink"]


@pytest.mark.parametrize("ending", ["bin", "json"])
def test_what_is_not_there_is_not_committed(tmp_path: Path, ending: str) -> None:
    """A rank's file that the first rank does not see whole."""
    before, after = saved.made(1), saved.made(2)
    before.save(tmp_path)

    class Forgetful(LocalDisk):
        def sync_folder(self, folder: Path) -> None:
            super().sync_folder(folder)
            for path in folder.glob(f"*.{ending}"):
                if path.name != saved.MANIFEST and path not in there:
                    path.write_bytes(path.read_bytes()[:-1])

    there = set(tmp_path.iterdir())
    with pytest.raises(OSError, match="a folder that all ranks see"):
        save_on(Forgetful(), after, tmp_path)
    assert is_of(tmp_path, before)
    after.save(tmp_path)
    assert is_of(tmp_path, after) and len(list(tmp_path.iterdir())) == 3
