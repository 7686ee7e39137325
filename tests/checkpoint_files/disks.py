"""Simulated failures of a disk: a full disk, a killed process, and a loss of power."""

import errno
import os
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sharding.storage.files import DurableFiles


class PowerLossError(BaseException):
    """Loss of power. This is a BaseException, so that no ``except Exception`` cleans up."""


class CountingDisk(DurableFiles):
    """Disk that calls ``before(number, name)`` before each operation, numbered from 0."""

    def __init__(self, before: Callable[[int, str], object]) -> None:
        super().__init__()
        self._before = before
        self.operations = 0

    def _count(self, name: str) -> None:
        self.operations += 1
        self._before(self.operations - 1, name)

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Any:
        self._count("create")
        with super().create_stream(path, mode) as file:
            self._count("write")
            yield file

    def sync(self, file: int) -> None:
        self._count("sync")
        super().sync(file)

    def rename(self, path: Any, new_path: Any) -> None:
        self._count("rename")
        super().rename(path, new_path)

    def rm_file(self, path: Any) -> None:
        self._count("remove")
        super().rm_file(path)

    def sync_folder(self, folder: Any) -> None:
        self._count("sync_folder")
        super().sync_folder(folder)


def full(at: int, *, forever: bool) -> CountingDisk:
    """Return a disk that is full for one operation, or from one operation on.

    Files can still be removed.
    """

    def before(number: int, name: str) -> None:
        if name != "remove" and (number >= at if forever else number == at):
            raise OSError(errno.ENOSPC, "No space left on device")

    return CountingDisk(before)


def killing(at: int, name: str = "") -> CountingDisk:
    """Return a disk that kills the process before one operation.

    With a name, only operations of this name count.
    """
    seen = 0

    def before(number: int, operation: str) -> None:
        nonlocal seen
        seen += operation == name
        if number == at if not name else (operation == name and seen > at):
            os.kill(os.getpid(), 9)

    return CountingDisk(before)


Name = tuple[Path, int | None]
"""Change of a name: the number of the file that it now belongs to, or None if it is removed."""


class PowerDisk(DurableFiles):
    """Disk that loses power before one of its operations, and knows the durable content.

    The bytes of a file are durable after a sync of the file. Changes of names are durable after a
    sync of the folder. Before that sync, any subset of the changes may survive.

    Args:
        folder: folder whose files are durable at the start.
        at: number of the operation before which power is lost.
    """

    def __init__(self, folder: Path, at: int) -> None:
        super().__init__()
        self._at = at
        self._done = 0
        files = sorted(folder.iterdir())
        self._synced: list[bytes | None] = [path.read_bytes() for path in files]
        self._names: dict[Path, int] = {path: number for number, path in enumerate(files)}
        self._durable = dict(self._names)
        self._pending: list[list[Name]] = []
        self._open: Path | None = None

    def _operation(self) -> None:
        self._done += 1
        if self._done > self._at:
            raise PowerLossError

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Any:
        self._operation()
        with super().create_stream(path, mode) as file:
            self._open = Path(path)
            number = self._names[self._open] = len(self._synced)
            self._synced.append(None)
            self._pending.append([(self._open, number)])
            yield file

    def sync(self, file: int) -> None:
        self._operation()
        super().sync(file)
        assert self._open is not None
        self._synced[self._names[self._open]] = self._open.read_bytes()

    def rename(self, path: Any, new_path: Any) -> None:
        self._operation()
        super().rename(path, new_path)
        old, new = Path(path), Path(new_path)
        self._names[new] = self._names.pop(old)
        self._pending.append([(old, None), (new, self._names[new])])

    def rm_file(self, path: Any) -> None:
        self._operation()
        super().rm_file(path)
        del self._names[Path(path)]
        self._pending.append([(Path(path), None)])

    def sync_folder(self, folder: Any) -> None:
        self._operation()
        super().sync_folder(folder)
        for change in self._pending:
            _apply(self._durable, change)
        self._pending = []

    def left(self, to: Path, stays: Callable[[int, list[Name]], bool], part: bytes) -> None:
        """Write the surviving content to another folder.

        Args:
            to: the other folder.
            stays: returns True if a change that was not synced survives, by its number.
            part: the bytes of a file that was not synced.
        """
        names = dict(self._durable)
        for number, change in enumerate(self._pending):
            if stays(number, change):
                _apply(names, change)
        to.mkdir()
        for path, number in names.items():
            content = self._synced[number]
            (to / path.name).write_bytes(part if content is None else content)


def _apply(names: dict[Path, int], change: list[Name]) -> None:
    for path, number in change:
        if number is None:
            names.pop(path, None)
        else:
            names[path] = number
