"""The work queue of all hooks: what follows a bucket's communication, one job after the other."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from sharding.transport.local_group import LocalGroup


class WorkQueue:
    """Jobs, done one after the other in the order in which they were handed in.

    Whatever the timing: so collectives that jobs launch leave in the same order on all ranks.

    On the CPU a job waits for messages, so a thread does it. On an accelerator its stream waits,
    and whoever hands it in does it at once: then one thread launches all collectives of a rank, of
    all process groups, in one order, which NCCL asks for. All jobs run in one stream, so that a job
    finds what those before it have written; torch gives each callback of a future a stream of its
    own, which waits for no other callback's.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "functional_optim hooks")
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._last: Future[Tensor] | None = None
        """The last job that was given to the thread."""

    def put(
        self, job: Callable[[], Tensor], device: torch.device, *, ready: bool = True
    ) -> Future[Tensor]:
        """A future of what the job returns, or of the error that it raises.

        Args:
            job: on an accelerator, called in a stream that comes after all that is queued now.
            device: of the tensor that it returns.
            ready: whether the job waits for nothing that the caller has yet to do.
        """
        started: Future[None] = Future(devices=[device] if device.type != "cpu" else [])
        # A callback, and not set_exception: DDP reads a future's value in C++, and would take an
        # exception that was set for the value.
        in_order = job if device.type != "cuda" else self._in_stream(job, device)
        done = started.then(lambda _: in_order())
        if device.type == "cuda" and ready and (self._last is None or self._last.done()):
            started.set_result(None)
        else:
            self._last = done
            self._thread.submit(started.set_result, None)
        return done

    def _in_stream(self, job: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
        """The job in the one stream of a device, after what is queued there now."""
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)
        queued = torch.cuda.current_stream(device).record_event()

        def call() -> Tensor:
            with torch.cuda.stream(stream):
                stream.wait_event(queued)
                result = job()
            # In which the future notes when its value is there.
            torch.cuda.current_stream(device).wait_stream(stream)
            return result

        return call

    def wait(self) -> None:
        """Return when all jobs handed in so far are done, or have failed. Not for a job to call.

        What the caller queues on a device from then on comes after all that they have queued there.
        """
        self._thread.submit(lambda: None).result()
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)


_OF_THREADS: WeakKeyDictionary[LocalGroup, WorkQueue] = WeakKeyDictionary()
"""The queue of each rank that is a thread of this process."""
_OF_PROCESS: list[WorkQueue] = []
"""The one queue of this process; none before the first hook is made."""
os.register_at_fork(after_in_child=_OF_PROCESS.clear)  # whose thread is not there


def work_queue_of(group: dist.ProcessGroup) -> WorkQueue:
    """Return the one queue of a rank, for all its hooks and all its process groups.

    Hooks of several modules, over several groups, launch collectives in the order in which backward
    passes bring buckets. It is the same on all ranks, which NCCL asks for.
    """
    if isinstance(group, LocalGroup):
        return _OF_THREADS.setdefault(group, WorkQueue())
    if not _OF_PROCESS:
        _OF_PROCESS.append(WorkQueue())
    return _OF_PROCESS[0]
