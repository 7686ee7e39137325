"""Workers that are threads of this process, without sockets and copies."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from torch import Tensor

from functional_optim.engine.recipes import OpaqueRecipe, Recipe
from functional_optim.remote.snapshot import Reading
from functional_optim.remote.versions import Lease, Versions, read_all
from functional_optim.remote.worker import Exchange, WorkerGroup, WorkerLock, WorkerOptimizer


class _Handle(NamedTuple):
    worker: str
    target: Any


class ThreadTransport:
    """Transport with one thread per worker, started when the first object is placed on the worker.

    A worker makes one call at a time, in the order sent. Tensors are not copied, so the caller must
    not change a gradient until the step is complete. After :meth:`close`, :meth:`place` and
    :meth:`call` raise RuntimeError.

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
        """Call ``make(*args)`` in a worker's thread. Return a Future of the result's handle."""
        return self._thread(worker).submit(lambda: _Handle(worker, make(*args)))

    def call(self, handle: Any, method: str, *args: Any) -> "Future[Any]":
        """Call a method of a placed object in its worker's thread."""
        thread = self._thread(handle.worker)
        return thread.submit(lambda: getattr(handle.target, method)(*args))

    def close(self) -> None:
        """End the threads, after the calls that were sent."""
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


def make_worker(recipe: Recipe | OpaqueRecipe, groups: Sequence[WorkerGroup]) -> WorkerOptimizer:
    """Return the optimizer over a worker's parameters."""
    return WorkerOptimizer(recipe, groups, WorkerLock(), InProcessExchange())


class InProcessExchange(Exchange):
    """Exchange without copies: readers share memory with the parameters."""

    def gradients(self, source: Any, params: Sequence[Tensor]) -> list[Tensor | None]:
        return list(source)

    def read(self, params: Sequence[Tensor], versions: Sequence[Versions]) -> Reading:
        """Return leaf tensors that share memory with the parameters, under one lease."""
        pairs, lease = zip(params, versions, strict=True), Lease()
        copied = sum(param.nbytes for param, known in pairs if known.is_contested)
        return Reading(read_all(params, versions, [lease] * len(params)), lease, copied)
