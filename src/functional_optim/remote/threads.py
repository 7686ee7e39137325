"""Workers that are threads of this process: no sockets, no copies."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from functional_optim.frontends.local_optimizer import Foreign
from functional_optim.frontends.recipe import Recipe
from functional_optim.remote.exchange import InProcess
from functional_optim.remote.turn import Turn
from functional_optim.remote.worker import Share, WorkerOptimizer


class _Handle(NamedTuple):
    worker: str
    thing: Any


class ThreadTransport:
    """Transport with a thread for each worker, started when something is first placed on it.

    A worker makes one call after the other, in the order in which they are sent. Tensors are handed
    over as they are, so that whoever gives a gradient leaves it alone until the step is made.

    Example::

        >>> transport = ThreadTransport()
        >>> handle = transport.place("first", list, [3, 1, 2]).result()
        >>> transport.call(handle, "sort").result()
        >>> transport.call(handle, "index", 3).result()
        2
        >>> transport.close()
    """

    has_contexts = False
    keeps_order = True

    def __init__(self) -> None:
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._lock = threading.Lock()
        self._closed = False

    def place(self, worker: str, make: Callable[..., Any], *args: Any) -> "Future[Any]":
        """Call ``make(*args)`` in a worker's thread; a Future of a handle to what it returns.

        Raises:
            RuntimeError: this transport is closed.
        """
        return self._thread(worker).submit(lambda: _Handle(worker, make(*args)))

    def call(self, handle: Any, method: str, *args: Any) -> "Future[Any]":
        """Call a method of what was placed, in its worker's thread.

        Raises:
            RuntimeError: this transport is closed.
        """
        thread = self._thread(handle.worker)
        return thread.submit(lambda: getattr(handle.thing, method)(*args))

    def close(self) -> None:
        """Wait for calls that were sent, and end the threads."""
        with self._lock:
            self._closed = True
        for thread in self._threads.values():
            thread.shutdown(wait=True)

    def _thread(self, worker: str) -> ThreadPoolExecutor:
        with self._lock:
            if self._closed:
                raise RuntimeError(
                    f"the worker {worker!r} is closed: make an optimizer with another transport"
                )
            if worker not in self._threads:
                name = f"functional_optim-{worker}"
                self._threads[worker] = ThreadPoolExecutor(1, thread_name_prefix=name)
            return self._threads[worker]


def make_worker(found: Recipe | Foreign, shares: Sequence[Share]) -> WorkerOptimizer:
    """The optimizer over a worker's parameters, which is given its gradients."""
    return WorkerOptimizer(found, shares, Turn(), InProcess())
