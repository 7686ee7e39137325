"""Tests that a damaged or forged checkpoint loads nothing and runs no code."""

import io
import json
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from sharding.storage import ChecksumReader
from sharding.storage.checksums import METADATA, read_checksums
from sharding.storage.folder import read_folder
from tests.choices import EVERYTHING, case

from . import runs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    runs.save(tmp_path / "saved", 1)
    return tmp_path / "saved"


def sidecar_of(folder: Path) -> Path:
    (found,) = folder.glob("checksums-*.json")
    return found


def refused(folder: Path, reader: Any = None) -> str:
    with pytest.raises(dcp.CheckpointException) as raised:
        runs.load(folder, reader)
    return str(raised.value)


def test_each_flipped_bit_is_found(folder: Path) -> None:
    """`make test` tries one byte in 97 of every file, and `make test-all` tries every byte."""
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        for place in range(0, len(content), 1 if EVERYTHING else 97):
            changed = bytearray(content)
            changed[place] ^= 1 << place % 8
            path.write_bytes(changed)
            assert str(folder) in refused(folder)
        path.write_bytes(content)
    assert runs.version_of(folder) == 1


@pytest.mark.parametrize("change", ["shorter", "longer", "gone", "link", "folder", "pipe"])
@pytest.mark.parametrize("pattern", ["*.distcp", METADATA, "checksums-*.json"])
def test_files_that_are_not_as_written(folder: Path, pattern: str, change: str) -> None:
    """A file of another size or kind is refused."""
    path = max(folder.glob(pattern))
    content = path.read_bytes()
    path.unlink()
    if change == "shorter":
        path.write_bytes(content[:-1])
    elif change == "longer":
        path.write_bytes(content + b"x")
    elif change == "link":
        (folder.parent / "elsewhere").write_bytes(content)
        path.symlink_to(folder.parent / "elsewhere")
    elif change == "folder":
        path.mkdir()
    elif change == "pipe":
        os.mkfifo(path)
    assert str(folder) in refused(folder)


def forge(folder: Path, metadata: bytes) -> None:
    """Write other metadata with a matching checksum, as an attacker can."""
    (folder / METADATA).write_bytes(metadata)
    path = sidecar_of(folder)
    content = json.loads(path.read_text())
    content["files"][METADATA] = [len(metadata), crc32(metadata)]
    path.write_text(json.dumps(content))


class Planted:
    """Object whose pickle runs code when it is loaded."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("import builtins; builtins.planted = True",)


def test_no_code_of_the_metadata_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own reader does run the code, so the planted metadata is effective."""
    import builtins

    monkeypatch.setattr(builtins, "planted", False, raising=False)
    metadata = pickle.loads((folder / METADATA).read_bytes())
    metadata.planner_data = Planted()
    forge(folder, pickle.dumps(metadata))
    assert "cannot be read without running code" in refused(folder)
    assert "it has builtins.exec" in refused(folder, ChecksumReader(folder, verify=False))
    with pytest.raises(ValueError, match=r"it has builtins\.exec"):
        read_folder(folder)
    assert not builtins.planted
    runs.load(folder, dcp.FileSystemReader(folder))
    assert builtins.planted


def test_no_code_of_a_value_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that are not tensors are pickles too."""
    import builtins

    monkeypatch.setattr(builtins, "planted", False, raising=False)
    parts = [{**runs.part(rank, 1), "lr": Planted()} for rank in range(runs.RANKS)]
    runs.write_parts(parts, tmp_path)
    assert "'lr' is damaged, or cannot be read without running code" in refused_late(tmp_path)
    assert not builtins.planted


def refused_late(folder: Path) -> str:
    """Return the error of a load that fails at the value of an option."""
    state: dict[str, Any] = {"lr": -1.0}
    with pytest.raises(dcp.CheckpointException) as raised:
        dcp.state_dict_loader._load_state_dict(state, ChecksumReader(folder), no_dist=True)
    assert state == {"lr": -1.0}
    return str(raised.value)


METADATAS: dict[str, Callable[[Metadata], Any]] = {
    "a file elsewhere": lambda m: rename(m, "../elsewhere"),
    "an absolute path": lambda m: rename(m, "/etc/hostname"),
    "a file without checksum": lambda m: rename(m, "notes.txt"),
    "no files": lambda m: setattr(m, "storage_data", None),
}


def rename(metadata: Metadata, name: str) -> None:
    for one in metadata.storage_data.values():
        object.__setattr__(one, "relative_path", name)


def test_metadata_of_another_form_is_refused(folder: Path) -> None:
    (folder / "notes.txt").write_text("of someone else")
    whole = (folder / METADATA).read_bytes()
    for what, edit in METADATAS.items():
        with case(what=what):
            metadata = pickle.loads(whole)
            edit(metadata)
            forge(folder, pickle.dumps(metadata))
            assert METADATA in refused(folder)
    for content in (b"", b"x", pickle.dumps({"a": 1}), pickle.dumps(metadata)[:-9]):
        with case(content=content[:9]):
            forge(folder, content)
            assert METADATA in refused(folder)


SIDECARS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another format": lambda c: c.update(format="else"),
    "a later version": lambda c: c.update(version=2),
    "no files": lambda c: c.pop("files"),
    "a path": lambda c: c["files"].update({"../x": [0, 0]}),
    "a negative size": lambda c: c["files"].update({"x": [-1, 0]}),
    "a size that is none": lambda c: c["files"].update({"x": [True, 0]}),
    "three numbers": lambda c: c["files"].update({"x": [1, 2, 3]}),
}


def test_checksums_of_another_form_are_refused(folder: Path) -> None:
    path = sidecar_of(folder)
    whole = path.read_text()
    for what, edit in SIDECARS.items():
        with case(what=what):
            content = json.loads(whole)
            edit(content)
            path.write_text(json.dumps(content))
            assert "does not have the checksum in checksums-" in refused(folder)
    for text in ("", "[]", "{", "1" * 5000, "[" * 200_000, "\x00"):
        with case(text=text[:9]):
            path.write_text(text)
            assert "does not have the checksum in checksums-" in refused(folder)


def test_a_folder_without_checksums_needs_another_reader(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save({"b": torch.ones(())}, checkpoint_id=tmp_path)
    state = {"b": torch.zeros(())}
    with pytest.raises(dcp.CheckpointException, match="has no checksums; save with"):
        dcp.state_dict_loader._load_state_dict(state, ChecksumReader(tmp_path), no_dist=True)
    reader = ChecksumReader(tmp_path, verify=False)
    dcp.state_dict_loader._load_state_dict(state, reader, no_dist=True)
    assert state["b"] == 1.0
    assert read_folder(tmp_path) == {"b": torch.ones(())}


def test_a_folder_is_read_whole(folder: Path) -> None:
    found = read_folder(folder)
    assert found["lr"] == 0.5 and found["b"] == 1.0
    assert torch.equal(found["w"], torch.arange(12.0).view(3, 4) + 100)
    without = read_folder(folder, values=False)
    assert without["w"].is_meta and without["b"] == 1.0


def test_tensors_that_are_larger_than_their_files_are_not_allocated(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = pickle.loads((folder / METADATA).read_bytes())
    metadata.state_dict_metadata["w"].size = torch.Size([3_000_000_000, 4])
    forge(folder, pickle.dumps(metadata))
    monkeypatch.setattr(torch, "empty", None)
    with pytest.raises(ValueError, match="fewer bytes than 'w' needs"):
        read_folder(folder)


@pytest.mark.parametrize("path", ["w", (), ("b", "w"), ("x",) * 200, (1.5,), (["b"],), None])
def test_keys_that_lead_nowhere_are_refused(folder: Path, path: Any) -> None:
    metadata = pickle.loads((folder / METADATA).read_bytes())
    metadata.planner_data["w"] = path
    forge(folder, pickle.dumps(metadata))
    with pytest.raises(ValueError, match="the metadata has no place for"):
        read_folder(folder)


def test_the_checksums_are_those_of_the_files(folder: Path) -> None:
    """Other tools can check the files, since the checksums are plain CRC-32 values."""
    files = read_checksums(folder).files
    assert {*files} == {path.name for path in folder.glob("*.distcp")}
    for name, (size, found) in files.items():
        content = (folder / name).read_bytes()
        assert (size, found) == (len(content), crc32(content))
    assert re.fullmatch(r"checksums-[0-9a-f]{8}\.json", sidecar_of(folder).name)
    assert io.BytesIO((folder / METADATA).read_bytes()).read(1) == b"\x80"
