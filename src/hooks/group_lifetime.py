"""Process groups live a little longer than the hooks that give callbacks to threads of gloo.

What a user's communication hook has follow a collective is called, and then let go of, in a thread
of gloo, which needs Python's lock for that. A group that is freed at this moment waits for its
threads with the lock in hand, for ever; if what is let go of is the last to hold the group, the
thread waits for itself, and ends the process. Both happen where a program destroys the group and
drops DDP right after a backward pass. So the group is held for some seconds more, and then freed in
a thread that has nothing else to do. Hooks that give gloo no callbacks need none of this.
"""

import atexit
import os
import threading
import weakref
from typing import Any

import torch.distributed as dist

SECONDS = 5.0
"""For how long a group is held, once its hook is gone."""

LONGEST = 30.0
"""For how many seconds a program that ends waits for a group that is just being freed."""

_FREEING = threading.Lock()


_HELD: Any = weakref.WeakKeyDictionary()
"""By owner, the numbers of the groups that are held for it; a group that is held keeps its own."""


def outlive(owner: object, group: dist.ProcessGroup) -> None:
    """Hold a group until some time after the owner is gone, and free it in another thread then.

    Once for each group, however often it is asked for: a hook may ask at each bucket.
    """
    held = _HELD.setdefault(owner, set())
    if id(group) not in held:
        held.add(id(group))
        weakref.finalize(owner, _let_go_later, group).atexit = False


def _let_go_later(group: dist.ProcessGroup) -> None:
    timer = threading.Timer(SECONDS, _free, args=([group],))
    timer.daemon = True  # a program that ends need not wait for it
    timer.start()


def _free(held: list[dist.ProcessGroup]) -> None:
    with _FREEING:
        held.clear()


def _free_no_more() -> None:
    """A thread that frees a group while Python ends is stopped, which aborts the process."""
    _FREEING.acquire(timeout=LONGEST)


def _begin_anew() -> None:
    """After a fork: whoever was freeing a group is not there."""
    global _FREEING  # noqa: PLW0603  one lock of the process
    _FREEING = threading.Lock()


atexit.register(_free_no_more)
os.register_at_fork(after_in_child=_begin_anew)
