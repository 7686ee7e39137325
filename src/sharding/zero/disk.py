"""The file system, as checkpoints use it: every byte that is written passes through a ``Disk``.

A short write, a full disk and a loss of power are then one other ``Disk`` in a test.
"""

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Protocol, Self
from zlib import crc32

NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
OLD_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
CANNOT_SYNC_FOLDERS = (errno.EINVAL, errno.ENOTSUP)
"""What a file system answers that has no way to sync a folder."""


class Disk(Protocol):
    """Operations that change files. Each raises OSError if it fails."""

    def make_folder(self, folder: Path) -> None:
        """Make a folder, and those that it is to be in, so that they outlast a loss of power."""

    def create(self, path: Path) -> int:
        """Make a new file; returns its descriptor. There must be nothing under its name yet."""

    def write(self, file: int, data: memoryview) -> int:
        """Write some bytes; returns how many were written, which may be fewer."""

    def sync(self, file: int) -> None:
        """Return when what was written outlasts a loss of power."""

    def close(self, file: int) -> None:
        """Close a file."""

    def replace(self, path: Path, target: Path) -> None:
        """Give a file another name, in place of the file that had it."""

    def unlink(self, path: Path) -> None:
        """Remove a file."""

    def sync_folder(self, folder: Path) -> None:
        """Return when the names in a folder outlast a loss of power."""


class LocalDisk:
    """The operating system's files."""

    def make_folder(self, folder: Path) -> None:
        if folder.is_dir():
            return
        self.make_folder(folder.parent)
        folder.mkdir(exist_ok=True)  # another rank may make it at this moment
        self.sync_folder(folder.parent)

    def create(self, path: Path) -> int:
        return os.open(path, NEW_FILE, 0o666)

    def write(self, file: int, data: memoryview) -> int:
        return os.write(file, data)

    def sync(self, file: int) -> None:
        os.fsync(file)

    def close(self, file: int) -> None:
        os.close(file)

    def replace(self, path: Path, target: Path) -> None:
        path.replace(target)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def sync_folder(self, folder: Path) -> None:
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(opened)
        except OSError as error:
            if error.errno not in CANNOT_SYNC_FOLDERS:
                raise
        finally:
            os.close(opened)


LOCAL_DISK = LocalDisk()


class NewFile:
    """A file that is being written: whole, and synced when it is closed, or not there at all.

    Use it in a ``with`` statement: it is synced at its end, and removed where an error leaves it.

    Args:
        disk: where it is written.
        path: of the file, which must not be there yet.
    """

    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk = disk
        self._path = path
        self._file = disk.create(path)
        self.size = 0
        """Bytes that were written."""
        self.crc32 = 0
        """Their checksum."""

    def write(self, data: memoryview) -> None:
        """Write all of it.

        Raises:
            OSError: it was not written; names the file.
        """
        while data:
            try:
                count = self._disk.write(self._file, data)
            except OSError as error:
                error.filename = str(self._path)
                raise
            if count <= 0:
                raise OSError(errno.EIO, "a write wrote nothing", str(self._path))
            self.size += count
            self.crc32 = crc32(data[:count], self.crc32)
            data = data[count:]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._disk.sync(self._file)
        except BaseException:
            self._close_and_remove()
            raise
        if error is None:
            self._disk.close(self._file)  # some file systems report here what was not written
        else:
            self._close_and_remove()

    def _close_and_remove(self) -> None:
        with suppress(OSError):  # the error that led here says more
            self._disk.close(self._file)
        with suppress(OSError):
            self._disk.unlink(self._path)


def put(disk: Disk, path: Path, part: Path, data: bytes) -> None:
    """Put a file in place at once, and for good: nobody ever finds half of it.

    Args:
        disk: where it is written.
        path: of the file.
        part: the name, in the same folder, under which it is written first.
        data: what it is to hold.
    """
    with NewFile(disk, part) as file:
        file.write(memoryview(data))
    disk.replace(part, path)
    disk.sync_folder(path.parent)


def opened(path: Path) -> BinaryIO:
    """A file, opened for reading, without a buffer. Links and devices are not followed.

    Raises:
        FileNotFoundError: there is none.
        ValueError: something else has its name: a link, a folder, a device.
    """
    try:
        file = os.open(path, OLD_FILE)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(
                f"{path} is a link; the files of a checkpoint lie in its folder: copy them there"
            ) from error
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise ValueError(f"{path} is no file of bytes; the files of a checkpoint are")
    return os.fdopen(file, "rb", buffering=0)


def opened_shard(path: Path) -> BinaryIO:
    """Open a file that a checkpoint consists of, as :func:`opened` does.

    A missing file is no FileNotFoundError, which means that there is no checkpoint: a program that
    catches it begins a new run.

    Raises:
        ValueError: the file is missing, or something else has its name.
    """
    try:
        return opened(path)
    except FileNotFoundError as error:
        raise ValueError(
            f"{path} is missing, and the checkpoint in its folder was completed with it; copy the "
            "whole folder, or go on from another checkpoint"
        ) from error


def size_of(path: Path) -> int | None:
    """Return the size of a file in bytes; None if there is no such file."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None
