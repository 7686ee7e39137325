"""Handles of launched operations, and a CUDA event to wait for."""

import threading
from collections.abc import Callable, Iterable

import torch


class StreamEvent:
    """CUDA event, recorded on the current stream of a device; on the CPU it does nothing.

    It is also the handle of an operation of a group of one rank: only the kernels that write the
    buffer are waited for.
    """

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._event = torch.cuda.current_stream(device).record_event() if is_cuda else None
        self._device = device

    def wait(self) -> None:
        """Let the current stream wait for all work that was queued before the event."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)


class PendingWork:
    """Operation whose messages move by themselves; the first thread that waits finishes it.

    Args:
        finish: waits for the messages of other ranks, and processes them. It is called once.
        devices: whose streams have the results. The stream of each later thread waits for them.
    """

    def __init__(self, finish: Callable[[], None], devices: Iterable[torch.device] = ()) -> None:
        self.done = False
        """True once the operation has ended, also with an error."""
        self._finish = finish
        self._devices = devices
        self._events: list[StreamEvent] = []
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Return when the operation is finished; on an accelerator, let the current stream wait."""
        with self._lock:
            if self.done:
                for event in self._events:
                    event.wait()
            else:
                try:
                    self._finish()
                except BaseException as error:  # noqa: BLE001  Ctrl-C too: no message can be waited for twice
                    self._error = error
                # The closure is dropped, because it holds messages and memory.
                self.done, self._finish = True, lambda: None
                self._events = list(map(StreamEvent, self._devices))
            if self._error is not None:
                raise self._error
