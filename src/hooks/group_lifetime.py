"""Delayed release of process groups whose threads may still run callbacks.

A thread of gloo calls and then frees the callbacks that a user's communication hook adds to a
collective, and needs Python's lock for that. If the group is freed at this moment, the freeing
thread waits for gloo's threads while it holds the lock: a deadlock. If a callback has the last
reference to the group, the thread waits for itself, which ends the process. Both can happen if a
program destroys the group and drops DDP right after a backward pass. So the group is kept alive for
some seconds, and then freed in a separate thread. Hooks without such callbacks do not need this.
"""

import atexit
import os
import threading
import weakref
from typing import Any

import torch.distributed as dist

SECONDS = 5.0
"""Seconds for which a group outlives its hook."""

TIMEOUT = 30.0
"""Seconds for which the end of a program waits for a group that is being freed."""

_FREEING = threading.Lock()

_HELD: Any = weakref.WeakKeyDictionary()
"""For each owner, the ids of the groups kept alive for it. These groups cannot reuse an id."""


def keep_group_alive(owner: object, group: dist.ProcessGroup) -> None:
    """Keep a group alive until some time after its owner is freed; then free it in another thread.

    Repeated calls for the same group have no effect: a hook may call this for each bucket.
    """
    held = _HELD.setdefault(owner, set())
    if id(group) not in held:
        held.add(id(group))
        weakref.finalize(owner, _free_later, group).atexit = False


def _free_later(group: dist.ProcessGroup) -> None:
    timer = threading.Timer(SECONDS, _free, args=([group],))
    timer.daemon = True  # the end of a program does not wait for it
    timer.start()


def _free(held: list[dist.ProcessGroup]) -> None:
    with _FREEING:
        held.clear()


def _wait_until_freed() -> None:
    """Wait for a thread that frees a group: at exit, Python stops it, which aborts the process."""
    _FREEING.acquire(timeout=TIMEOUT)


def _reset_lock() -> None:
    """Release the lock after a fork: the thread that held it is not in the child."""
    global _FREEING  # noqa: PLW0603  one lock of the process
    _FREEING = threading.Lock()


atexit.register(_wait_until_freed)
os.register_at_fork(after_in_child=_reset_lock)
