"""Search for missing ranks, after a collective failed with an error that does not name them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from hooks.driver import Guard
from sharding.transport import TransportError, make_transport


def missing_ranks_guard(group: dist.ProcessGroup, device: torch.device) -> Guard:
    """Return a context that adds the missing ranks to a RuntimeError of its body.

    After such an error, each rank sends a message to every other, whose failure names the ranks
    that are absent. These messages have separate tags, so they do no harm when ranks are out of
    step. All ranks call this function together.

    Args:
        group: the ranks.
        device: of the parameters. Only gloo, on the CPU, can name ranks.
    """
    transport = make_transport(group, device) if device.type == "cpu" else None
    lock, known = threading.Lock(), list[str]()

    def missing() -> str | None:
        """Return an error that names the missing ranks; None if all ranks answered."""
        with lock:  # both DDP's thread and the queue's may fail
            if transport is not None and not known:
                every = torch.zeros(transport.size, device="cpu")
                ranges = [(rank, rank + 1) for rank in range(transport.size)]
                try:
                    transport.reduce_scatter(every, ranges).wait()
                except TransportError as error:
                    known.append(str(error))
            return known[0] if known else None

    @contextmanager
    def guard(what: str) -> Iterator[None]:
        try:
            yield
        except TransportError:  # names the ranks already
            raise
        except RuntimeError as error:
            found = missing()
            if found is None:
                raise
            raise RuntimeError(
                f"{what} failed. Asked who is there: {found}. What failed first: {error}"
            ) from error

    return guard
