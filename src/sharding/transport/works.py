"""Operations that were launched, as whoever launched them waits for them."""

import threading
from collections.abc import Callable

import torch
from torch import Tensor


class Queued:
    """Mark on the current stream of a device, for other streams to wait for; nothing on the CPU.

    Args:
        device: of the stream.
    """

    def __init__(self, device: torch.device) -> None:
        is_queue = device.type == "cuda"
        self._event = torch.cuda.current_stream(device).record_event() if is_queue else None
        self._device = device

    def wait(self) -> None:
        """Have the current stream wait for all that was queued when the mark was made."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)


class Done:
    """An operation with nothing to do: that of a group of one."""

    def __init__(self, flat: Tensor) -> None:
        self._queued = Queued(flat.device)

    def wait(self) -> None:
        """Have the current stream wait for what had written the buffer."""
        self._queued.wait()


class Launched:
    """An operation that moves without any help, and is finished once, by whoever waits first.

    Args:
        finish: waits for what comes from other ranks, and does what follows.
    """

    def __init__(self, finish: Callable[[], None]) -> None:
        self.done = False
        """Whether it has ended, well or not."""
        self._finish = finish
        self._error: BaseException | None = None
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


def _nothing() -> None:
    """Do nothing: the operation has ended."""
