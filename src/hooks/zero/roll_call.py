"""Search for missing ranks, after a collective failed that does not name them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from sharding.transport import Transport, TransportError, make_transport


class RollCall:
    """A message from each rank to each other, which names the ranks that it does not reach.

    Collective to make; to ask, all ranks should come, and those that do not are named. Messages
    are told apart from all others, so it does no harm to ask when ranks are out of step.

    Args:
        group: whose ranks.
        device: of the parameters. Only gloo, on the CPU, knows more than its collectives say.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._lock = threading.Lock()
        self._known: str | None = None
        self._transport: Transport | None = None
        if device.type == "cpu":
            self._transport = make_transport(group, device)

    def missing(self) -> str | None:
        """Return what is wrong with which ranks; None if all have answered."""
        with self._lock:  # DDP's thread and the hook's may both fail
            self._known = self._known or self._asked()
            return self._known

    def _asked(self) -> str | None:
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
        """Have an error inside say which ranks are missing, if any are.

        Raises:
            RuntimeError: what failed, and who does not answer.
        """
        try:
            yield
        except TransportError:  # names them already
            raise
        except RuntimeError as error:
            missing = self.missing()
            if missing is None:
                raise
            raise RuntimeError(
                f"{what} failed. Asked who is there: {missing}. What failed first: {error}"
            ) from error
