"""A work queue: one thread that does what follows each bucket's communication, in order."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future


class WorkQueue:
    """Jobs, done one after the other in the order in which they were handed in.

    Whatever the timing: so collectives that jobs launch leave in the same order on all ranks.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "zero-hook")

    def put(self, job: Callable[[], Tensor], device: torch.device) -> Future[Tensor]:
        """A future of what the job returns, or of the error that it raises.

        Args:
            job: called in the thread; on an accelerator, in a stream that comes after all that is
                queued at that moment.
            device: of the tensor that it returns.
        """
        started: Future[None] = Future(devices=[device] if device.type != "cpu" else [])
        # A callback, and not set_exception: DDP reads a future's value in C++, and would take an
        # exception that was set for the value.
        done = started.then(lambda _: job())
        self._thread.submit(started.set_result, None)
        return done

    def wait(self) -> None:
        """Return when all jobs handed in so far are done, or have failed. Not for a job to call."""
        self._thread.submit(lambda: None).result()


_QUEUES: WeakKeyDictionary[dist.ProcessGroup, WorkQueue] = WeakKeyDictionary()


def work_queue_of(group: dist.ProcessGroup) -> WorkQueue:
    """The one queue for all that jobs launch on a group, whichever hooks they come from."""
    return _QUEUES.setdefault(group, WorkQueue())
