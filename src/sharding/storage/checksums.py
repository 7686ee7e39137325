"""``checksums-TOKEN.json``: size and CRC-32 of every file of a checkpoint, ``.metadata`` included.

A folder may have several of these files, if a save was killed. The one that has the checksum of
``.metadata`` as it is now belongs to the checkpoint in the folder.
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
PART = ".metadata.tmp"
"""The name under which ``.metadata`` is written, before it is put in place."""
FORMAT, VERSION = "checksums of a checkpoint", 1
SIDECAR = re.compile(r"checksums-[0-9a-f]{8}\.json")
OF_SAVES = re.compile(rf"__(?:[0-9a-f]{{8}}_)?\d+_\d+\.distcp|{SIDECAR.pattern}|{re.escape(PART)}")
"""Names of the files of any save, complete or not; those of torch's own writer among them."""


class Recorded(NamedTuple):
    """Files that a checkpoint consists of."""

    sidecar: str
    """Name of the file that has the checksums."""
    files: Mapping[str, Checksum]
    """By name; without ``.metadata``."""
    metadata: bytes
    """Content of ``.metadata``, which has its checksum."""

    def names(self) -> set[str]:
        """Return the names of all files that belong to the checkpoint."""
        return {self.sidecar, METADATA, *self.files}


def sidecar_name(token: str) -> str:
    """Return the name of the file of checksums of a save."""
    return f"checksums-{token}.json"


def encode_checksums(files: Mapping[str, Checksum], metadata: bytes) -> bytes:
    """Return the content of a file of checksums.

    Args:
        files: of the checkpoint, by name.
        metadata: content of ``.metadata``.
    """
    every = {**files, METADATA: Checksum(len(metadata), crc32(metadata))}
    return json.dumps({"format": FORMAT, "version": VERSION, "files": every}).encode()


def read_checksums(folder: Path) -> Recorded:
    """Read the checksums of the checkpoint in a folder, and check ``.metadata``. Nothing runs.

    Raises:
        FileNotFoundError: no checkpoint was completed there.
        ValueError: the checkpoint has no checksums, or one of the two files was damaged.
    """
    metadata = read_metadata_file(folder)
    now = Checksum(len(metadata), crc32(metadata))
    names = sorted(name for name in os.listdir(folder) if SIDECAR.fullmatch(name))  # noqa: PTH208
    for name in names:
        with suppress(ValueError, RecursionError):  # of a save that was killed
            files = _files(json.loads(read_file(folder / name)))
            if files.pop(METADATA, None) == now:
                return Recorded(name, files, metadata)
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
        ValueError: something else than a file has that name.
    """
    try:
        return read_file(folder / METADATA)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(
            f"{folder} has no {METADATA}, so no checkpoint was completed there; "
            "torch.distributed.checkpoint.save writes one"
        ) from error


def has_checksums(folder: Path) -> bool:
    """Return True if a folder has a file of checksums, whole or not."""
    return any(map(SIDECAR.fullmatch, os.listdir(folder)))  # noqa: PTH208


def _files(content: Any) -> dict[str, Checksum]:
    """Return the checksums in a file, by name.

    Raises:
        ValueError: the file has something else.
    """
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
    """Remove what saves have left in a folder: files with the names of saves, and no others.

    Args:
        files: where they are removed.
        folder: a folder of checkpoints.
        keep: names of the files that stay.
    """
    for name in sorted(os.listdir(folder)):  # noqa: PTH208  names are what is matched
        if OF_SAVES.fullmatch(name) and name not in keep:
            # What cannot be removed now is removed by the next save, and harms no checkpoint.
            with suppress(OSError):
                files.rm_file(folder / name)
