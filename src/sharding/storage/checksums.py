"""``checksums-TOKEN.json``: size and CRC-32 of every file of a checkpoint, and of ``.metadata``.

A folder may have several of these files, if a save was killed. The file with the checksum of the
current ``.metadata`` belongs to the checkpoint in the folder.
"""

import json
import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from sharding.storage.files import Checksum, DurableFiles, read_file

METADATA = ".metadata"
METADATA_PART = ".metadata.tmp"
"""The name under which ``.metadata`` is written, before it gets its own name."""
FORMAT, VERSION = "checksums of a checkpoint", 1
SIDECAR = re.compile(r"checksums-[0-9a-f]{8}\.json")
SAVED_FILES = re.compile(
    rf"__(?:[0-9a-f]{{8}}_)?\d+_\d+\.distcp|{SIDECAR.pattern}|{re.escape(METADATA_PART)}"
)
"""Names of the files of any save, complete or not, also of torch's own writer."""


class CheckpointFiles(NamedTuple):
    """Files of a checkpoint."""

    sidecar: str
    """Name of the file with the checksums."""
    files: Mapping[str, Checksum]
    """Checksums by name, without ``.metadata``."""
    metadata: bytes
    """Content of ``.metadata``, which has its checksum."""

    def names(self) -> set[str]:
        """Return the names of all files that belong to the checkpoint."""
        return {self.sidecar, METADATA, *self.files}


def encode_checksums(files: Mapping[str, Checksum], metadata: bytes) -> bytes:
    """Return the content of a file of checksums, of files by name and of ``.metadata``."""
    every = {**files, METADATA: Checksum(len(metadata), crc32(metadata))}
    return json.dumps({"format": FORMAT, "version": VERSION, "files": every}).encode()


def read_checksums(folder: Path) -> CheckpointFiles:
    """Read the checksums of the checkpoint in a folder, and check ``.metadata``. No code runs.

    Raises:
        FileNotFoundError: no checkpoint was completed there.
        ValueError: the checkpoint has no checksums, or one of the two files was damaged.
    """
    metadata = read_metadata_file(folder)
    now = Checksum(len(metadata), crc32(metadata))
    names = sorted(name for name in os.listdir(folder) if SIDECAR.fullmatch(name))  # noqa: PTH208
    for name in names:
        with suppress(ValueError, RecursionError):  # of a save that was killed
            files = _parse_checksums(json.loads(read_file(folder / name)))
            if files.pop(METADATA, None) == now:
                return CheckpointFiles(name, files, metadata)
    if names:
        raise ValueError(
            f"{folder / METADATA} does not have the checksum in {', '.join(names)}; one of the "
            "files was damaged: go on from another checkpoint"
        )
    raise ValueError(
        f"{folder} has no checksums; save with storage_writer=sharding.storage.ChecksumWriter(...)"
    )


def read_metadata_file(folder: Path) -> bytes:
    """Return the content of ``.metadata``.

    Raises:
        FileNotFoundError: no checkpoint was completed there.
        ValueError: ``.metadata`` is not a regular file.
    """
    try:
        return read_file(folder / METADATA)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(
            f"{folder} has no {METADATA}, so no checkpoint was completed there; "
            "torch.distributed.checkpoint.save writes one"
        ) from error


def has_checksums(folder: Path) -> bool:
    """Return True if a folder has a file of checksums, complete or not."""
    return any(map(SIDECAR.fullmatch, os.listdir(folder)))  # noqa: PTH208


def _parse_checksums(content: Any) -> dict[str, Checksum]:
    """Return the checksums in the JSON of a file, by name. Raise ValueError for another form."""
    if not isinstance(content, dict) or (content.get("format"), content.get("version")) != (
        FORMAT,
        VERSION,
    ):
        raise ValueError(f"must be {FORMAT!r}, version {VERSION}")
    files = content.get("files")
    if not isinstance(files, dict) or not all(map(_is_record, files, files.values())):
        raise ValueError("must have a size and a CRC-32 of each file")
    return {name: Checksum(*one) for name, one in files.items()}


def _is_record(name: str, one: Any) -> bool:
    counts = isinstance(one, list) and len(one) == 2 and all(type(k) is int and k >= 0 for k in one)
    return counts and Path(name).name == name


def remove_leftovers(files: DurableFiles, folder: Path, keep: Collection[str]) -> None:
    """Remove incomplete and replaced files of saves from a folder, and no other files."""
    for name in sorted(os.listdir(folder)):  # noqa: PTH208  names are matched, not paths
        if SAVED_FILES.fullmatch(name) and name not in keep:
            # The next save tries to remove a file again. It harms no checkpoint.
            with suppress(OSError):
                files.rm_file(folder / name)
