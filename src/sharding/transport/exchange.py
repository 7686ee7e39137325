"""An exchange of messages between the ranks of a group, and what is done when all have come."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from sharding.transport.messages import Message, receive
from sharding.transport.protocol import Work


class Done:
    """An operation with nothing to do: that of a group of one."""

    def __init__(self, flat: Tensor) -> None:
        self._flat = flat

    def wait(self) -> None:
        """Nothing to wait for."""

    def future(self) -> Future[Tensor]:
        """The buffer."""
        future: Future[Tensor] = Future()
        future.set_result(self._flat)
        return future


class Exchange:
    """Messages on their way.

    They move without any help. What follows them (sums) is done once, by the first thread that
    waits: the caller of :meth:`wait`, or, where :meth:`future` was asked for, the worker.

    Args:
        what: the operation, for errors.
        group: whose ranks exchange.
        flat: the buffer that the future hands out.
        messages: all that have to arrive.
        then: what follows.
        worker: the one thread in which futures are completed, in the order they were asked for.
    """

    def __init__(
        self,
        what: str,
        group: dist.ProcessGroup,
        flat: Tensor,
        messages: Sequence[Message],
        then: Callable[[], None],
        worker: ThreadPoolExecutor,
    ) -> None:
        self.done = False
        """Whether it has ended, well or not."""
        self._what = what
        self._group = group
        self._flat = flat
        self._messages = messages
        self._then = then
        self._worker = worker
        self._error: BaseException | None = None
        self._future: Future[Tensor] | None = None
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Return when all messages have arrived and what follows is done.

        Raises:
            TransportError: names the ranks that did not come.
        """
        with self._lock:
            if not self.done:
                try:
                    receive(self._what, self._group, self._messages)
                    self._then()
                except BaseException as error:  # noqa: BLE001  Ctrl-C too: no message can be waited for twice
                    self._error = error
                self.done = True
                self._messages, self._then = (), _nothing
            if self._error is not None:
                raise self._error

    def future(self) -> Future[Tensor]:
        """The buffer, when the worker has waited."""
        if self._future is None:
            self._future = future_of(self, self._flat, self._worker)
        return self._future


def future_of(work: Work, flat: Tensor, worker: ThreadPoolExecutor) -> Future[Tensor]:
    """A future of a buffer, which a worker completes when it has waited for the operation."""

    def waited(_: Future[None]) -> Tensor:
        work.wait()
        return flat

    started: Future[None] = Future()
    # A callback, and not set_exception: DDP reads a future's value in C++, and would take an
    # exception that was set for the value.
    done = started.then(waited)
    worker.submit(started.set_result, None)
    return done


def _nothing() -> None:
    """What follows an exchange that has ended."""
