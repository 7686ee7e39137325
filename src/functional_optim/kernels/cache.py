"""Cache of traces, programs and loops, each made once for a key."""

import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

_Entry = TypeVar("_Entry")

ENTRIES = 512
"""How many entries a cache keeps."""

_TURN = [threading.RLock()]


def _forked() -> None:
    """In a child there are no other threads, and the turn of none."""
    _TURN[0] = threading.RLock()


os.register_at_fork(after_in_child=_forked)


def turn() -> threading.RLock:
    """Whoever holds it compiles: one thread at a time, whatever it is."""
    return _TURN[0]


class Cache(dict[Any, _Entry]):
    """Entries by key. One that has too many begins anew: keys that never end fill no memory."""

    def get_or_make(self, key: Any, make: Callable[[], _Entry]) -> _Entry:
        """The entry for a key; made, where there is none, by one thread only."""
        try:
            return self[key]
        except KeyError:
            with turn():
                if key not in self:
                    made = make()
                    if len(self) >= ENTRIES:
                        self.clear()
                    self[key] = made
                    return made
                return self[key]
