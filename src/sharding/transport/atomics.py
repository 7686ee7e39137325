"""Table of 64-bit integers in shared memory, with acquire and release operations.

A writer writes a chunk and then a counter; a reader reads the counter and then the chunk. Both
processors must keep this order. x86-64 does, with plain reads and writes. ARM, POWER and others do
not, and need an atomic store with release order and a load with acquire order, in C++.
"""

import ctypes
import mmap
import platform
from functools import lru_cache

from functional_optim.native.cache import CompileError, library

IN_ORDER = frozenset({"x86_64", "amd64"})
"""Processors that keep the order of reads and of writes, named as in :func:`platform.machine`."""

_SOURCE = """
extern "C" long long acquire(const long long* from) {
  return __atomic_load_n(from, __ATOMIC_ACQUIRE);
}
extern "C" void release(long long* to, long long value) {
  __atomic_store_n(to, value, __ATOMIC_RELEASE);
}
"""
_FLAGS = ("-O2", "-fPIC", "-shared")


def unsupported_reason() -> str:
    """Return why this machine has no ordered access to shared memory; empty if it has."""
    try:
        _functions()
    except CompileError as error:
        return (
            f"this processor ({platform.machine()}) may mix the order of what is written to "
            f"memory, and what keeps it was not compiled: {error}"
        )
    return ""


@lru_cache(maxsize=1)
def _functions() -> ctypes.CDLL | None:
    """Return a library with the atomic operations, or None if the processor keeps the order.

    Raises:
        CompileError: the C++ code cannot be compiled.
    """
    if platform.machine().lower() in IN_ORDER:
        return None
    compiled = library(_SOURCE, _FLAGS)
    compiled.acquire.argtypes, compiled.acquire.restype = [ctypes.c_void_p], ctypes.c_longlong
    compiled.release.argtypes = [ctypes.c_void_p, ctypes.c_longlong]
    compiled.release.restype = None
    return compiled


class AtomicTable:
    """64-bit integers at the beginning of shared memory, each with one writer.

    Plain access (``table[3]``) is for integers of this process, and for integers that are written
    before a release and read after an acquire.
    """

    def __init__(self, memory: mmap.mmap, length: int) -> None:
        self._numbers = memoryview(memory).cast("q")[:length]
        self._functions = _functions()
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(memory))

    def __getitem__(self, index: int) -> int:
        return self._numbers[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._numbers[index] = value

    def acquire(self, index: int) -> int:
        """Read an integer. Later reads see all writes that the writer made before its release."""
        if self._functions is None:
            return self._numbers[index]
        return int(self._functions.acquire(self._start + 8 * index))

    def release(self, index: int, value: int) -> None:
        """Write an integer. A process that acquires it sees all earlier writes of this process."""
        if self._functions is None:
            self._numbers[index] = value
        else:
            self._functions.release(self._start + 8 * index, value)
