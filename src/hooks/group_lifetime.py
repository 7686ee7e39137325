"""Process groups live a little longer than the hooks that communicate over them.

What follows a collective is called, and then let go of, in a thread of gloo, which needs Python's
lock for that. A group that is freed at this moment waits for its threads with the lock in hand, for
ever; if what is let go of is the last to hold the group, the thread waits for itself, and ends the
process. Both happen where a program destroys the group and drops DDP right after a backward pass.
"""

import threading
import weakref

import torch.distributed as dist

SECONDS = 5.0
"""For how long a group is held once its hook is gone: its threads are done after milliseconds."""


def outlive(owner: object, group: dist.ProcessGroup) -> None:
    """Hold a group until some time after the owner is gone, and free it in another thread then."""
    weakref.finalize(owner, _let_go_later, group).atexit = False


def _let_go_later(group: dist.ProcessGroup) -> None:
    timer = threading.Timer(SECONDS, lambda _: None, args=(group,))
    timer.daemon = True  # a program that ends need not wait for it
    timer.start()
