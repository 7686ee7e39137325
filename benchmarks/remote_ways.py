"""Optimizers of a model on the server, ours and torch's, and the threads that train it."""

import importlib
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import repeat
from typing import Any, Protocol, Self

import torch
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc

from benchmarks import remote as who
from benchmarks import remote_server as server
from benchmarks.remote_server import SERVER
from benchmarks.workloads import Shape
from functional_optim import DistributedOptimizer


class Way(Protocol):
    """Optimizer of parameters that live on a server."""

    def gradients(self) -> AbstractContextManager[Any]:
        """Return a context with the gradients of one trainer, for all steps of its thread."""

    def step(self, gradients: Any) -> None:
        """Make one step."""

    def python_seconds(self, count: int) -> float:
        """Return the seconds of a Python loop in a thread of the server's process."""

    def moved(self) -> list[float]:
        """Return the distance of each parameter from its start."""

    def close(self) -> None:
        """Release the parameters."""


class OverRPC:
    """Way with a server in another process, which keeps gradients in autograd contexts."""

    def __init__(self, name: str, rule: str, shapes: Sequence[Shape]) -> None:
        self._name = name
        kind = who.RULES[rule]
        params = rpc.rpc_sync(SERVER, server.hold, args=(name, list(shapes)))
        if name == who.RPC:
            rpc.rpc_sync(SERVER, server.prepare, args=(rule, len(shapes)))
            self._optimizer: Any = DistributedOptimizer(kind.ours, params, **kind.options)
        else:
            given = kind.scripted if name == who.SCRIPTED else kind.python
            self._optimizer = _torchs(given, params, kind.options)
        assert self._optimizer.is_functional_optim == (name != who.PYTHON)
        self.step = self._optimizer.step

    @contextmanager
    def gradients(self) -> Iterator[int]:
        """Run a backward pass, and yield its context. A step keeps the gradients."""
        with dist_autograd.context() as context:
            loss = rpc.rpc_sync(SERVER, server.loss, args=(self._name,))
            dist_autograd.backward(context, [loss])
            yield context

    def python_seconds(self, count: int) -> float:
        """See :meth:`Way.python_seconds`. The loop runs in a thread of the server."""
        found: float = rpc.rpc_sync(SERVER, server.python_seconds, args=(count,))
        return found

    def moved(self) -> list[float]:
        """See :meth:`Way.moved`."""
        found: list[float] = rpc.rpc_sync(SERVER, server.moved, args=(self._name,))
        return found

    def close(self) -> None:
        """Release the parameters."""
        if self._name == who.RPC:
            self._optimizer.close()
        rpc.rpc_sync(SERVER, server.drop, args=(self._name,))


class OverThreads:
    """Way with a server that is a thread of this process, and gets gradients."""

    def __init__(self, rule: str, shapes: Sequence[Shape]) -> None:
        kind = who.RULES[rule]
        self._params = server.parameters(shapes)
        named = [(str(place), param) for place, param in enumerate(self._params)]
        server.prepare(rule, len(shapes))
        self._optimizer = DistributedOptimizer.over_threads(
            kind.ours, named, {name: SERVER for name, _ in named}, **kind.options
        )
        self.step = self._optimizer.step

    @contextmanager
    def gradients(self) -> Iterator[list[torch.Tensor]]:
        """Yield a gradient for each parameter."""
        yield [torch.randn_like(one, requires_grad=False) for one in self._params]

    def python_seconds(self, count: int) -> float:
        """See :meth:`Way.python_seconds`. The loop runs in this thread."""
        return server.python_seconds(count)

    def moved(self) -> list[float]:
        """See :meth:`Way.moved`."""
        return [server.distance(one) for one in self._params]

    def close(self) -> None:
        """End the server's thread."""
        self._optimizer.close()


def _torchs(optimizer_class: Any, params: Any, options: Mapping[str, Any]) -> Any:
    """Return torch's DistributedOptimizer. Hide the warnings of torch that TorchScript ends."""
    with warnings.catch_warnings(record=True):  # as in benchmarks.cases
        warnings.simplefilter("ignore")
        found = importlib.import_module("torch.distributed.optim")
        return found.DistributedOptimizer(optimizer_class, params, **options)


def way(name: str, rule: str, shapes: Sequence[Shape]) -> Way:
    """Build a contestant with its own parameters."""
    return OverThreads(rule, shapes) if name == who.THREADS else OverRPC(name, rule, shapes)


class Trainers:
    """Threads that step one optimizer, each by its own gradients. ``with`` closes them.

    Args:
        way: the optimizer.
        count: the number of threads.
    """

    def __init__(self, way: Way, count: int) -> None:
        self.count = count
        self._way = way
        self._own = threading.local()
        self._gate = threading.Barrier(count + 1)  # so that each thread of the pool takes one task
        self._pool = ThreadPoolExecutor(count)

    def __enter__(self) -> Self:
        for one in self._sent(self._begin):
            one.result()
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._sent(self._end):
            one.result()
        self._pool.shutdown()

    def seconds_per_step(self, count: int) -> float:
        """Return the time for ``count`` steps of each thread, divided by the steps of all."""
        # Each thread notes its times: this thread may wake up too late to see the start.
        begun, ended = zip(*(one.result() for one in self._sent(self._steps, count)), strict=True)
        return float(max(ended) - min(begun)) / (self.count * count)

    def python_seconds(self, count: int) -> float:
        """Return the seconds of a Python loop in the server's process while all trainers step."""
        ended = threading.Event()
        futures = self._sent(self._until, ended)
        try:
            return self._way.python_seconds(count)
        finally:
            ended.set()
            for one in futures:
                one.result()

    def _sent(self, function: Any, *args: Any) -> "list[Future[Any]]":
        """Call a function in each thread. All threads begin when this method returns."""
        futures = [self._pool.submit(self._called, function, args) for _ in range(self.count)]
        self._gate.wait()
        return futures

    def _called(self, function: Any, args: Any) -> Any:
        self._gate.wait()
        return function(*args)

    def _begin(self) -> None:
        self._own.stack = ExitStack()
        self._own.gradients = self._own.stack.enter_context(self._way.gradients())

    def _end(self) -> None:
        self._own.stack.close()

    def _steps(self, count: int) -> tuple[float, float]:
        """Make ``count`` steps. Return the times of their beginning and end."""
        step, gradients = self._way.step, self._own.gradients
        begin = time.perf_counter()
        for _ in repeat(None, count):
            step(gradients)
        return begin, time.perf_counter()

    def _until(self, ended: threading.Event) -> None:
        step, gradients = self._way.step, self._own.gradients
        while not ended.is_set():
            step(gradients)
