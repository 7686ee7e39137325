"""Numbers that processes tell one another in shared memory, in an order that both see.

Who writes a chunk and then a number, for another to read the number and then the chunk, needs both
processors to keep to that order. x86-64 does, for plain reads and writes; ARM, POWER and others do
not, and there two functions in C++ do it: a write that releases, and a read that acquires.
"""

import ctypes
import mmap
import platform
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from functional_optim.native.cache import CompileError, library

IN_ORDER = frozenset({"x86_64", "amd64"})
"""Processors that read in order and write in order, as :func:`platform.machine` calls them."""

_SOURCE = """
extern "C" long long acquire(const long long* from) {
  return __atomic_load_n(from, __ATOMIC_ACQUIRE);
}
extern "C" void release(long long* to, long long value) {
  __atomic_store_n(to, value, __ATOMIC_RELEASE);
}
"""
_FLAGS = ("-O2", "-fPIC", "-shared")


class _Functions(NamedTuple):
    """The two, on addresses."""

    acquire: Callable[[int], int]
    release: Callable[[int, int], None]


def why_not() -> str:
    """Return why numbers cannot be exchanged in order on this machine; empty if they can."""
    try:
        _functions()
    except CompileError as error:
        return (
            f"this processor ({platform.machine()}) may mix the order of what is written to "
            f"memory, and what keeps it was not compiled: {error}"
        )
    return ""


@lru_cache(maxsize=1)
def _functions() -> _Functions | None:
    """Return the functions that order memory accesses; None if the processor keeps the order.

    Raises:
        CompileError: it cannot be had.
    """
    if platform.machine().lower() in IN_ORDER:
        return None
    made = library(_SOURCE, _FLAGS)
    made.acquire.argtypes, made.acquire.restype = [ctypes.c_void_p], ctypes.c_longlong
    made.release.argtypes, made.release.restype = [ctypes.c_void_p, ctypes.c_longlong], None
    return _Functions(made.acquire, made.release)


class SharedNumbers:
    """64-bit numbers at the beginning of shared memory, each with one writer.

    Plain reading and writing (``table[3]``) is for a process's own numbers, and for what is written
    before a release, and read after an acquire.

    Args:
        memory: shared; it begins with the numbers.
        length: how many there are.
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
        """Read a number: what is read afterwards is at least as new as what it tells of."""
        if self._functions is None:
            return self._numbers[index]
        return self._functions.acquire(self._start + 8 * index)

    def release(self, index: int, value: int) -> None:
        """Write a number: who sees it sees all that was read and written before."""
        if self._functions is None:
            self._numbers[index] = value
        else:
            self._functions.release(self._start + 8 * index, value)
