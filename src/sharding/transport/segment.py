"""Memory that processes of one host share: one of them makes it, the others find it by its name."""

import fcntl
import mmap
import os
import secrets
import weakref
from pathlib import Path

DIRECTORY = Path("/dev/shm")  # noqa: S108  where Linux keeps shared memory; the name is drawn
"""Elsewhere there is none of this kind."""


class Segment:
    """A piece of shared memory, filled with zeros at first.

    Its pages are there from the beginning: where a host has less shared memory than this asks for
    (containers often have 64 MB), it is an error here, and not a signal that ends the process when
    it writes. As long as its owner lives, it holds a lock on it, by which the others see that.

    Args:
        name: a number; to make one, that of :func:`new_name`.
        nbytes: how large it is.
        owner: make it, and not just find it.

    Raises:
        OSError: there is no room for it, or none of that name and size.
    """

    def __init__(self, name: int, nbytes: int, *, owner: bool) -> None:
        self._path = DIRECTORY / f"functional-optim-{name:016x}"
        # For the lock alone: what a fork inherits with the memory must not hold it.
        self._held = os.open(self._path, os.O_RDWR | (os.O_CREAT | os.O_EXCL) * owner, 0o600)
        self._close = weakref.finalize(self, os.close, self._held)
        _HELD.add(self)
        try:
            if owner:
                fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.posix_fallocate(self._held, 0, nbytes)
            with self._path.open("r+b") as file:
                self.memory = mmap.mmap(file.fileno(), nbytes)
        except (OSError, ValueError) as error:
            self._close()
            if owner:
                self.unlink()
            raise OSError(f"cannot map {nbytes} bytes of shared memory: {error}") from error

    def unlink(self) -> None:
        """Nobody else is to find it. It is freed when the last that has it lets go of it."""
        self._path.unlink(missing_ok=True)

    @property
    def has_owner(self) -> bool:
        """Whether the process that made it lives."""
        try:
            fcntl.flock(self._held, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._held, fcntl.LOCK_UN)
        return False

    def forget(self) -> None:
        """In a child of a fork: hold nothing."""
        self._close()


_HELD: weakref.WeakSet[Segment] = weakref.WeakSet()


def _forget_all() -> None:
    for segment in list(_HELD):
        segment.forget()


os.register_at_fork(after_in_child=_forget_all)


def new_name() -> int:
    """A number that no other segment has."""
    return secrets.randbits(62) + 1
