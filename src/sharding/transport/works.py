"""Operations that were launched, as whoever launched them waits for them."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from torch.futures import Future

from sharding.transport.protocol import Work


class Queued:
    """What is queued on the current stream of a device when this is made; nothing on the CPU.

    Args:
        device: of the stream.
    """

    def __init__(self, device: torch.device) -> None:
        is_queue = device.type == "cuda"
        self._event = torch.cuda.current_stream(device).record_event() if is_queue else None
        self._device = device

    def wait(self) -> None:
        """Have the current stream, which may be another one by now, wait for it."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)


class Done:
    """An operation with nothing to do: that of a group of one."""

    def __init__(self, flat: Tensor) -> None:
        self._flat = flat
        self._queued = Queued(flat.device)

    def wait(self) -> None:
        """Have the current stream wait for what had written the buffer."""
        self._queued.wait()

    def future(self) -> Future[Tensor]:
        """The buffer; on an accelerator, whoever takes it waits for what is queued there now."""
        device = self._flat.device
        future: Future[Tensor] = Future(devices=[] if device.type == "cpu" else [device])
        future.set_result(self._flat)
        return future


class Launched:
    """An operation that moves without any help, and is finished once, by whoever waits first.

    That is the caller of :meth:`wait`, or, where :meth:`future` was asked for, the worker.

    Args:
        flat: the buffer that the future hands out.
        finish: waits for what comes from other ranks, and does what follows.
        worker: the one thread in which futures are completed, in the order they were asked for.
    """

    def __init__(
        self, flat: Tensor, finish: Callable[[], None], worker: ThreadPoolExecutor
    ) -> None:
        self.done = False
        """Whether it has ended, well or not."""
        self._flat = flat
        self._finish = finish
        self._worker = worker
        self._error: BaseException | None = None
        self._future: Future[Tensor] | None = None
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Return when it is finished.

        Raises:
            TransportError: names the ranks that did not come.
        """
        with self._lock:
            if not self.done:
                try:
                    self._finish()
                except BaseException as error:  # noqa: BLE001  Ctrl-C too: no message can be waited for twice
                    self._error = error
                self.done, self._finish = True, _nothing  # which held messages and memory
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
    """Do nothing: the operation has ended."""
