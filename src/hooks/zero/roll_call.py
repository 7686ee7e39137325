"""Search for missing ranks, after a collective failed with an error that does not name them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from sharding.transport import Transport, TransportError, make_transport


class RollCall:
    """Message from each rank to every other, whose failure names the missing ranks.

    All ranks construct it together. When it is called, absent ranks are named. Its messages have
    separate tags, so a call does no harm when ranks are out of step.

    Args:
        group: the ranks.
        device: of the parameters. Only gloo, on the CPU, can name ranks.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._lock = threading.Lock()
        self._known: str | None = None
        self._transport: Transport | None = None
        if device.type == "cpu":
            self._transport = make_transport(group, device)

    def missing(self) -> str | None:
        """Return an error that names the missing ranks; None if all ranks answered."""
        with self._lock:  # both DDP's thread and the queue's may fail
            self._known = self._known or self._call()
            return self._known

    def _call(self) -> str | None:
        if self._transport is None:
            return None
        every = torch.zeros(self._transport.size, device="cpu")
        ranges = [(rank, rank + 1) for rank in range(self._transport.size)]
        try:
            self._transport.reduce_scatter(every, ranges).wait()
        except TransportError as error:
            return str(error)
        return None

    @contextmanager
    def on_failure(self, what: str) -> Iterator[None]:
        """Add missing ranks to a RuntimeError that the body raises."""
        try:
            yield
        except TransportError:  # names the ranks already
            raise
        except RuntimeError as error:
            missing = self.missing()
            if missing is None:
                raise
            raise RuntimeError(
                f"{what} failed. Asked who is there: {missing}. What failed first: {error}"
            ) from error
