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

    Whatever the timing: so collectives that jobs launch leave in the same order on all ranks. On an
    accelerator, too: all jobs run in one stream, so that a job finds what those before it have
    written. torch gives each callback of a future a stream of its own, which waits for no other
    callback's.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "zero-hook")
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

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
        in_order = job if device.type != "cuda" else self._in_stream(job, device)
        done = started.then(lambda _: in_order())
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


_QUEUES: WeakKeyDictionary[dist.ProcessGroup, WorkQueue] = WeakKeyDictionary()


def work_queue_of(group: dist.ProcessGroup) -> WorkQueue:
    """The one queue for all that jobs launch on a group, whichever hooks they come from."""
    return _QUEUES.setdefault(group, WorkQueue())
