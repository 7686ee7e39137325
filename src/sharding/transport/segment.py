"""Anonymous shared memory of processes on one host. It has no name, so nothing is left behind.

One process creates a segment; other processes open it through the open files of that process. It
does not use ``/dev/shm``, which is small in containers.
"""

import fcntl
import mmap
import os
import secrets
import weakref
from pathlib import Path
from typing import NamedTuple, Self

PROCESSES = Path("/proc")
"""Folder of processes and their open files on Linux. Other systems have no such memory."""


class Address(NamedTuple):
    """Address by which other processes of the host open a segment."""

    process: int
    descriptor: int
    token: int
    """Random number in the name of the open file, different for each segment."""


NOWHERE = Address(0, 0, 0)
"""Address of a rank without a segment."""


class SharedSegment:
    """Segment of shared memory, zero at first: :meth:`create` or :meth:`attach` one.

    The memory is freed when the last process closes it or ends.

    Args:
        descriptor: the open file, which the segment closes.
        nbytes: size of the segment.
        address: by which other processes open it.
    """

    def __init__(self, descriptor: int, nbytes: int, address: Address) -> None:
        self.address = address
        self.close = weakref.finalize(self, os.close, descriptor)
        try:
            self.memory = mmap.mmap(descriptor, nbytes)
        except (OSError, ValueError) as error:
            self.close()
            raise OSError(f"cannot map {nbytes} bytes of shared memory: {error}") from error

    @classmethod
    def create(cls, nbytes: int) -> Self:
        """Create a segment of this process.

        All pages are allocated here, so that missing memory is an error here, and not a signal that
        ends the process at a later write.
        """
        token = secrets.randbits(62) + 1
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no anonymous files")
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        descriptor = os.memfd_create(_file_name(token), flags)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
            # If a process shrank the file, writes of other processes would end them by a signal.
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        except OSError as error:
            os.close(descriptor)
            raise OSError(f"cannot make {nbytes} bytes of shared memory: {error}") from error
        return cls(descriptor, nbytes, Address(os.getpid(), descriptor, token))

    @classmethod
    def attach(cls, address: Address, nbytes: int) -> Self:
        """Open a segment that another process has created."""
        path = _open_file(address.process, address.descriptor)
        # The name is checked before opening: on another host, the path may be any other file.
        _check_file_name(path, address)
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            _check_file_name(_open_file(os.getpid(), descriptor), address)
        except OSError:
            os.close(descriptor)
            raise
        return cls(descriptor, nbytes, address)


def _file_name(token: int) -> str:
    return f"functional-optim-{token:016x}"


def _open_file(process: int, descriptor: int) -> Path:
    return PROCESSES / str(process) / "fd" / str(descriptor)


def _check_file_name(path: Path, address: Address) -> None:
    """Check that an open file is the segment of an address."""
    found, wanted = str(path.readlink()), f"/memfd:{_file_name(address.token)}"
    if found.removesuffix(" (deleted)") != wanted:
        raise FileNotFoundError(f"{path} is {found}, and not {wanted}")
