"""Memory that processes of one host share: it has no name, so nothing stays when they are killed.

One process makes it; the others find it among the open files of that process. It is not of
``/dev/shm``, which is small in containers, and which others need.
"""

import fcntl
import mmap
import os
import secrets
import weakref
from pathlib import Path
from typing import NamedTuple, Self

PROCESSES = Path("/proc")
"""Where Linux shows processes and their open files. Elsewhere there is no such memory."""


class Address(NamedTuple):
    """By which another process of the host finds a segment."""

    process: int
    descriptor: int
    token: int
    """A number that no other segment has: it stands in the title of the open file."""


NOWHERE = Address(0, 0, 0)
"""Of no segment."""


class SharedSegment:
    """A piece of shared memory, filled with zeros at first: :meth:`make` or :meth:`find` one.

    As long as its owner lives, it holds a lock on it, by which the others see that. The memory is
    freed when the last process that has it lets go of it, or ends, however it ends.

    Args:
        held: an open file, for the lock alone: what a fork inherits with the memory must not hold
            it. From here on it belongs to the segment.
        nbytes: how large it is.
        address: where others find it.

    Raises:
        OSError: it is not so large, or cannot be mapped.
    """

    def __init__(self, held: int, nbytes: int, address: Address) -> None:
        self.address = address
        self._held = held
        self._close = weakref.finalize(self, os.close, held)
        _HELD.add(self)
        try:
            file = os.open(_open_file(os.getpid(), held), os.O_RDWR | os.O_CLOEXEC)
            try:
                self.memory = mmap.mmap(file, nbytes)
            finally:
                os.close(file)
        except (OSError, ValueError) as error:
            self._close()
            raise OSError(f"cannot map {nbytes} bytes of shared memory: {error}") from error

    @classmethod
    def make(cls, nbytes: int) -> Self:
        """A new one, of this process.

        Its pages are there from the beginning: where memory is missing, it is an error here, and
        not a signal that ends the process when it writes.

        Raises:
            OSError: there is no room for it, or no such memory on this system.
        """
        token = secrets.randbits(62) + 1
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no anonymous files")
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        held = os.memfd_create(_title(token), flags)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(held, 0, nbytes)
            # Nobody can make it shorter, which would end who writes to it by a signal.
            fcntl.fcntl(held, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        except OSError as error:
            os.close(held)
            raise OSError(f"cannot make {nbytes} bytes of shared memory: {error}") from error
        return cls(held, nbytes, Address(os.getpid(), held, token))

    @classmethod
    def find(cls, address: Address, nbytes: int) -> Self:
        """Find a segment that another process has made.

        Raises:
            OSError: there is none of that address and size on this host.
        """
        path = _open_file(address.process, address.descriptor)
        # Looked at before it is opened: a number may be that of another file, on another host.
        _check_title(path, address)
        held = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            _check_title(_open_file(os.getpid(), held), address)
        except OSError:
            os.close(held)
            raise
        return cls(held, nbytes, address)

    @property
    def has_owner(self) -> bool:
        """Return True if the process that made it lives."""
        try:
            fcntl.flock(self._held, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._held, fcntl.LOCK_UN)
        return False

    def forget(self) -> None:
        """In a child of a fork: hold nothing."""
        self._close()


_HELD: weakref.WeakSet[SharedSegment] = weakref.WeakSet()


def _forget_all() -> None:
    for segment in list(_HELD):
        segment.forget()


os.register_at_fork(after_in_child=_forget_all)


def _title(token: int) -> str:
    return f"functional-optim-{token:016x}"


def _open_file(process: int, descriptor: int) -> Path:
    return PROCESSES / str(process) / "fd" / str(descriptor)


def _check_title(path: Path, address: Address) -> None:
    """Make sure that an open file is the segment of an address."""
    found, wanted = str(path.readlink()), f"/memfd:{_title(address.token)}"
    if found.removesuffix(" (deleted)") != wanted:
        raise FileNotFoundError(f"{path} is {found}, and not {wanted}")
