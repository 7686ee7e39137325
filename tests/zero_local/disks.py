"""Disks that fail: full ones, slow ones, and one whose power is lost."""

import errno
from collections.abc import Callable
from pathlib import Path

from sharding.zero.disk import LocalDisk


class PowerLossError(BaseException):
    """Nothing runs any more: no clause that mends things may."""


class CountingDisk(LocalDisk):
    """Calls ``before(number, name)`` before each operation, numbered from 0."""

    def __init__(self, before: Callable[[int, str], object]) -> None:
        self._before = before
        self.operations = 0

    def _count(self, name: str) -> None:
        self.operations += 1
        self._before(self.operations - 1, name)

    def create(self, path: Path) -> int:
        self._count("create")
        return super().create(path)

    def write(self, file: int, data: memoryview) -> int:
        self._count("write")
        return super().write(file, data)

    def sync(self, file: int) -> None:
        self._count("sync")
        super().sync(file)

    def replace(self, path: Path, target: Path) -> None:
        self._count("replace")
        super().replace(path, target)

    def unlink(self, path: Path) -> None:
        self._count("unlink")
        super().unlink(path)

    def sync_folder(self, folder: Path) -> None:
        self._count("sync_folder")
        super().sync_folder(folder)


def full(at: int, *, forever: bool) -> CountingDisk:
    """No space is left for one operation, or from one on; removing files is still possible."""

    def before(number: int, name: str) -> None:
        if name != "unlink" and (number >= at if forever else number == at):
            raise OSError(errno.ENOSPC, "No space left on device")

    return CountingDisk(before)


def killed(at: int) -> CountingDisk:
    """The process is killed before one operation, and makes no other."""

    def before(number: int, name: str) -> None:
        if number >= at:
            raise PowerLossError

    return CountingDisk(before)


class ShortDisk(LocalDisk):
    """Writes some bytes of what it is given, as a pipe, a signal or a network does."""

    def __init__(self, most: int) -> None:
        self._most = most

    def write(self, file: int, data: memoryview) -> int:
        return super().write(file, data[: self._most])


class DeafDisk(LocalDisk):
    """Says that it has written nothing."""

    def write(self, file: int, data: memoryview) -> int:
        return 0


Name = tuple[Path, int | None]
"""What becomes of a name: it is of a file, by its number, or of none."""


class PowerDisk(LocalDisk):
    """Knows what is left when power is lost before one of its operations.

    The bytes of a file are there once it was synced. What was done to the names in a folder is
    there once the folder was; before, some of it may be, and some not, in any order.

    Args:
        folder: whose files are durable when this begins.
        at: the operation.
    """

    def __init__(self, folder: Path, at: int) -> None:
        self._at = at
        self._done = 0
        self._bytes: list[bytes] = [path.read_bytes() for path in sorted(folder.iterdir())]
        self._synced: list[bytes | None] = [*self._bytes]
        self._names: dict[Path, int] = {p: n for n, p in enumerate(sorted(folder.iterdir()))}
        self._durable = dict(self._names)
        self._pending: list[list[Name]] = []
        self._open: dict[int, int] = {}

    def _operation(self) -> None:
        self._done += 1
        if self._done > self._at:
            raise PowerLossError

    def create(self, path: Path) -> int:
        self._operation()
        file = super().create(path)
        number = self._open[file] = self._names[path] = len(self._bytes)
        self._bytes.append(b"")
        self._synced.append(None)
        self._pending.append([(path, number)])
        return file

    def write(self, file: int, data: memoryview) -> int:
        self._operation()
        count = super().write(file, data)
        self._bytes[self._open[file]] += bytes(data[:count])
        return count

    def sync(self, file: int) -> None:
        self._operation()
        super().sync(file)
        self._synced[self._open[file]] = self._bytes[self._open[file]]

    def close(self, file: int) -> None:
        super().close(file)
        del self._open[file]

    def replace(self, path: Path, target: Path) -> None:
        self._operation()
        super().replace(path, target)
        self._names[target] = self._names.pop(path)
        self._pending.append([(path, None), (target, self._names[target])])

    def unlink(self, path: Path) -> None:
        self._operation()
        super().unlink(path)
        del self._names[path]
        self._pending.append([(path, None)])

    def sync_folder(self, folder: Path) -> None:
        self._operation()
        super().sync_folder(folder)
        left = []
        for change in self._pending:
            here = all(path.parent == folder for path, _ in change)
            if here:
                _apply(self._durable, change)
            else:
                left.append(change)
        self._pending = left

    def left(self, to: Path, stays: Callable[[int, list[Name]], bool], share: float) -> None:
        """Write what is left to another folder.

        Args:
            to: that folder.
            stays: whether a change of names stays that was not synced, by its number.
            share: of the bytes that were not synced, from the first on.
        """
        names = dict(self._durable)
        for number, change in enumerate(self._pending):
            if stays(number, change):
                _apply(names, change)
        to.mkdir()
        for path, number in names.items():
            synced, written = self._synced[number], self._bytes[number]
            content = written[: int(share * len(written))] if synced is None else synced
            (to / path.name).write_bytes(content)


def _apply(names: dict[Path, int], change: list[Name]) -> None:
    for path, number in change:
        if number is None:
            names.pop(path, None)
        else:
            names[path] = number
