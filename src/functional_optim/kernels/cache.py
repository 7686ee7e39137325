"""Cache of traces, programs and loops, and the lock under which they are built."""

import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

_Entry = TypeVar("_Entry")

MAX_ENTRIES = 512
"""Largest number of entries of a cache."""

_LOCK = [threading.RLock()]


def _reset_lock() -> None:
    # A forked child lacks the parent's other threads. One of them may hold the lock.
    _LOCK[0] = threading.RLock()


os.register_at_fork(after_in_child=_reset_lock)


def compile_lock() -> threading.RLock:
    """Return the lock of this process under which one thread at a time compiles."""
    return _LOCK[0]


class Cache(dict[Any, _Entry]):
    """Entries by key. A full cache is cleared, so that memory is bounded."""

    def get_or_make(self, key: Any, make: Callable[[], _Entry]) -> _Entry:
        """Return the entry for a key. If there is none, one thread makes it."""
        try:
            return self[key]
        except KeyError:
            with compile_lock():
                if key not in self:
                    made = make()
                    if len(self) >= MAX_ENTRIES:
                        self.clear()
                    self[key] = made
                    return made
                return self[key]
