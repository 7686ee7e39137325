"""Files of a checkpoint: durable after they are closed, and opened without following links."""

import errno
import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from torch.distributed.checkpoint.filesystem import FileSystem

NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
OLD_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
CANNOT_SYNC_FOLDERS = (errno.EINVAL, errno.ENOTSUP)
"""Errors of file systems that cannot sync a folder."""
CHUNK_BYTES = 1 << 24
"""Number of bytes that are read at once."""


class Checksum(NamedTuple):
    """Size and checksum of a file."""

    size: int
    """In bytes."""
    crc32: int


class DurableFiles(FileSystem):
    """torch's file system for checkpoints, whose files and names survive a loss of power.

    A written file is synced when it is closed. It is removed if writing fails.

    Attributes:
        checksums: of the written files, by name.
    """

    def __init__(self) -> None:
        self.checksums: dict[str, Checksum] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open a file for reading, or a new file for writing.

        Raises:
            OSError: the file cannot be opened, written or synced; names it.
            ValueError: a file to read is a link, a folder or a device.
        """
        path = Path(path)
        if mode != "wb":
            with open_file(path) as old:
                yield old
            return
        path.unlink(missing_ok=True)  # a killed save may have left it
        file = _NewFile(io.FileIO(os.open(path, NEW_FILE, 0o666), "wb"), self)
        try:
            yield file
            file.close()
        except BaseException as error:
            if isinstance(error, OSError) and error.filename is None:
                error.filename = str(path)
            with suppress(OSError):
                file.raw.close()  # without a sync
            with suppress(OSError):
                path.unlink()
            raise
        self.checksums[path.name] = Checksum(file.size, file.crc32)

    def sync(self, file: int) -> None:
        """Sync a file, by its descriptor, so that its bytes survive a loss of power."""
        os.fsync(file)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Create a folder and its parents, so that they survive a loss of power."""
        folder = Path(path)
        if folder.is_dir():
            return
        self.mkdir(folder.parent)
        folder.mkdir(exist_ok=True)  # another rank may create it at the same time
        self.sync_folder(folder.parent)

    def sync_folder(self, folder: str | os.PathLike[str]) -> None:
        """Sync a folder, so that the names in it survive a loss of power."""
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(opened)
        except OSError as error:
            if error.errno not in CANNOT_SYNC_FOLDERS:
                raise
        finally:
            os.close(opened)


class _NewFile(io.BufferedWriter):
    """File opened for writing, with its size and checksum. It is synced when it is closed."""

    def __init__(self, raw: io.FileIO, files: DurableFiles) -> None:
        super().__init__(raw, 1 << 20)
        self._files = files
        self.size = self.crc32 = 0

    def write(self, data: Any, /) -> int:
        count = super().write(data)
        self.crc32 = crc32(data, self.crc32)
        self.size += count
        return count

    def close(self) -> None:
        if not self.closed and not self.raw.closed:
            self.flush()
            self._files.sync(self.fileno())
        super().close()


def open_file(path: Path) -> io.FileIO:
    """Open a file for reading, without following links.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is a link, a folder or a device.
    """
    try:
        file = os.open(path, OLD_FILE)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(
                f"{path} is a link; the files of a checkpoint must be in its folder: copy them "
                "there"
            ) from error
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise ValueError(f"{path} is no regular file, as the files of a checkpoint are")
    return io.FileIO(file, "rb")


def read_file(path: Path) -> bytes:
    """Read a whole file; errors as for :func:`open_file`."""
    with open_file(path) as file:
        return file.readall()


def check_file(path: Path, wanted: Checksum) -> None:
    """Read a file of a checkpoint. Raise ValueError if it is missing, or its checksum differs."""
    block, size, found = memoryview(bytearray(CHUNK_BYTES)), 0, 0
    try:
        with open_file(path) as file:
            while count := file.readinto(block):
                size, found = size + count, crc32(block[:count], found)
    except FileNotFoundError as error:
        raise ValueError(
            f"{path} is missing, and the checkpoint in its folder was completed with it; copy the "
            "whole folder, or go on from another checkpoint"
        ) from error
    if (size, found) != wanted:
        raise ValueError(
            f"{path} has {size} bytes with the CRC-32 {found:08x}, {wanted.size} bytes with "
            f"{wanted.crc32:08x} were written; it was damaged: go on from another checkpoint"
        )
