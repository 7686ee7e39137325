"""Files of a checkpoint: durable once they are closed, and opened without following links."""

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
"""Errors of file systems that have no way to sync a folder."""
CHUNK_BYTES = 1 << 24
"""Bytes that are read at once."""


class Checksum(NamedTuple):
    """Size and checksum of a file."""

    size: int
    """In bytes."""
    crc32: int


class DurableFiles(FileSystem):
    """torch's file system for checkpoints, whose files and names outlast a loss of power.

    A file that was written is synced when it is closed. It is removed if an error ends the writing.

    Attributes:
        checksums: by name, those of the files that were written.
    """

    def __init__(self) -> None:
        self.checksums: dict[str, Checksum] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open a file to be read, or a new file to be written.

        Raises:
            OSError: the file cannot be opened, written or synced; names it.
            ValueError: a link, a folder or a device has the name of a file to be read.
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
                file.raw.close()  # nothing of it is synced
            with suppress(OSError):
                path.unlink()
            raise
        self.checksums[path.name] = Checksum(file.size, file.crc32)

    def sync(self, file: int) -> None:
        """Return when the bytes of a file, by its descriptor, outlast a loss of power."""
        os.fsync(file)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Make a folder, and those above it, so that they outlast a loss of power."""
        folder = Path(path)
        if folder.is_dir():
            return
        self.mkdir(folder.parent)
        folder.mkdir(exist_ok=True)  # another rank may make it at this moment
        self.sync_folder(folder.parent)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Give a file another name, in place of the file that had it: at once."""
        Path(path).replace(new_path)

    def sync_folder(self, folder: str | os.PathLike[str]) -> None:
        """Return when the names in a folder outlast a loss of power."""
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(opened)
        except OSError as error:
            if error.errno not in CANNOT_SYNC_FOLDERS:
                raise
        finally:
            os.close(opened)


class _NewFile(io.BufferedWriter):
    """File that is being written; it is synced when it is closed."""

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
    """Open a file to be read. Links and devices are not followed.

    Raises:
        FileNotFoundError: there is none.
        ValueError: something else has its name: a link, a folder, a device.
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
    """Read a whole file.

    Raises:
        FileNotFoundError, ValueError: as for :func:`open_file`.
    """
    with open_file(path) as file:
        return file.readall()


def check_file(path: Path, wanted: Checksum) -> None:
    """Read a file of a checkpoint, and compare it with its checksum.

    Raises:
        ValueError: it is missing, or not what was written.
    """
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
