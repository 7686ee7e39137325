"""Work queue of all hooks: jobs that follow the communication of buckets, run one after another."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from sharding.transport.local_group import LocalGroup


def done_future(result: Tensor) -> Future[Tensor]:
    """Return a future that is done."""
    done: Future[Tensor] = Future(devices=[] if result.device.type == "cpu" else [result.device])
    done.set_result(result)
    return done


class WorkQueue:
    """Jobs that run one after another, in the order of submission.

    So collectives that jobs start have the same order on all ranks.

    On the CPU, jobs wait for messages, so they run in a thread. On an accelerator only the stream
    waits, so :meth:`submit` runs the job itself. One thread then starts all collectives of a rank,
    of all process groups, in one order, as NCCL requires. All jobs run in one stream, so a job sees
    what earlier jobs wrote. (torch runs each callback of a future in a separate stream, which does
    not wait for other callbacks.)
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "functional_optim hooks")
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._last: Future[Tensor] | None = None
        """The last job that was passed to the thread."""

    def submit(
        self, job: Callable[[], Tensor], device: torch.device, *, ready: bool = True
    ) -> Future[Tensor]:
        """Queue a job; return a future of its result or error.

        Args:
            job: on an accelerator, called in a stream that waits for all work queued so far.
            device: of the tensor that the job returns.
            ready: True if the job does not wait for anything that the caller does later.
        """
        trigger: Future[None] = Future(devices=[device] if device.type != "cpu" else [])
        # Raised in a callback instead of set_exception: DDP reads the future in C++, and would
        # take an exception set that way for the value.
        call = job if device.type != "cuda" else self._in_stream(job, device)
        done = trigger.then(lambda _: call())
        if device.type == "cuda" and ready and (self._last is None or self._last.done()):
            trigger.set_result(None)
        else:
            self._last = done
            self._thread.submit(trigger.set_result, None)
        return done

    def _in_stream(self, job: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
        """Wrap a job to run in the queue's stream of a device, after work queued there now."""
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)
        queued = torch.cuda.current_stream(device).record_event()

        def call() -> Tensor:
            with torch.cuda.stream(stream):
                stream.wait_event(queued)
                result = job()
            # The future records the event of its value in the current stream.
            torch.cuda.current_stream(device).wait_stream(stream)
            return result

        return call

    def wait(self) -> None:
        """Wait until all jobs submitted so far have ended. A job must not call this.

        On a device, work that the caller queues afterwards runs after the work of the jobs.
        """
        self._thread.submit(lambda: None).result()
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)


_QUEUE_OF_RANK: WeakKeyDictionary[LocalGroup, WorkQueue] = WeakKeyDictionary()
"""The queue of each rank that is a thread of this process."""
_PROCESS_QUEUE: list[WorkQueue] = []
"""The queue of this process; empty before the first hook."""
os.register_at_fork(after_in_child=_PROCESS_QUEUE.clear)  # the thread is not copied


def work_queue_of(group: dist.ProcessGroup) -> WorkQueue:
    """Return the queue of a rank, shared by all its hooks and process groups.

    Hooks of several modules and groups start collectives in the order in which backward passes
    bring buckets. This order is the same on all ranks, as NCCL requires.
    """
    if isinstance(group, LocalGroup):
        return _QUEUE_OF_RANK.setdefault(group, WorkQueue())
    if not _PROCESS_QUEUE:
        _PROCESS_QUEUE.append(WorkQueue())
    return _PROCESS_QUEUE[0]
