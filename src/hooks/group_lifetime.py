"""Process groups live a little longer than the hooks that communicate over them.

What follows a collective is called, and then let go of, in a thread of gloo, which needs Python's
lock for that. A group that is freed at this moment waits for its threads with the lock in hand, for
ever; if what is let go of is the last to hold the group, the thread waits for itself, and ends the
process. Both happen where a program destroys the group and drops DDP right after a backward pass.
"""

import atexit
import os
import threading
import weakref

import torch.distributed as dist

SECONDS = 5.0
"""For how long a group is held once its hook is gone: its threads are done after milliseconds."""

LONGEST = 30.0
"""For how many seconds a program that ends waits for a group that is just being freed."""

_FREEING = threading.Lock()


def outlive(owner: object, group: dist.ProcessGroup) -> None:
    """Hold a group until some time after the owner is gone, and free it in another thread then."""
    weakref.finalize(owner, _let_go_later, group).atexit = False


def _let_go_later(group: dist.ProcessGroup) -> None:
    timer = threading.Timer(SECONDS, _free, args=([group],))
    timer.daemon = True  # a program that ends need not wait for it
    timer.start()


def _free(held: list[dist.ProcessGroup]) -> None:
    with _FREEING:
        held.clear()


def _free_no_more() -> None:
    """A thread that frees a group while Python ends is stopped in the middle: an abort."""
    _FREEING.acquire(timeout=LONGEST)


def _begin_anew() -> None:
    """After a fork: whoever was freeing a group is not there."""
    global _FREEING  # noqa: PLW0603  one lock of the process
    _FREEING = threading.Lock()


atexit.register(_free_no_more)
os.register_at_fork(after_in_child=_begin_anew)
