"""Whose turn it is on a worker."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turn:
    """Held while parameters are stepped or read; it knows by whom."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: object = None

    @contextmanager
    def of(self, who: object) -> Iterator[bool]:
        """Hold it; whether someone else's turn had to end first."""
        waited = not self._lock.acquire(blocking=False)
        other = waited and self._holder is not who
        if waited:
            self._lock.acquire()
        self._holder = who
        try:
            yield other
        finally:
            self._lock.release()
