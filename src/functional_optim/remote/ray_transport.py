"""Workers that are Ray actors: processes on this machine or in a cluster."""

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from importlib import import_module
from typing import Any

from functional_optim.remote.futures import Failure, WorkerFuture, no_answer_error
from functional_optim.remote.transport import START_SECONDS, check_seconds

_FORBIDDEN_OPTIONS = (
    "allow_out_of_order_execution",
    "concurrency_groups",
    "get_if_exists",
    "max_concurrency",
    "max_restarts",
    "max_task_retries",
)
"""Options that are refused: with them, calls could overlap, change their order or run twice, or an
actor could belong to another transport or restart without its parameters."""


def require_ray() -> Any:
    """Import and return the package ``ray``, which must be connected to a cluster."""
    try:
        ray = import_module("ray")
    except ImportError as error:
        raise ImportError(
            "workers that are Ray actors need Ray, which is not installed: pip install "
            '"functional-optim[ray]"; DistributedOptimizer.over_threads does without it'
        ) from error
    if not ray.is_initialized():
        raise RuntimeError(
            "workers that are Ray actors need a cluster, and this process has none: call "
            'ray.init() first, or ray.init(address="auto") for one that runs already'
        )
    return ray


class Handle:
    """Handle of an object in an actor."""

    def __init__(self, worker: str, number: int) -> None:
        self.worker, self.number = worker, number


class RayTransport:
    """Transport with one actor per worker, started when the first object is placed on the worker.

    Each call is one message with one flat buffer for all tensors. A worker makes one call at a
    time, in the order sent. If an actor dies, is killed, or does not answer in time, the error
    names the worker. An actor that died is not restarted, because its parameters are lost: build
    another transport, and load a saved state.

    ``DistributedOptimizer.over_ray`` builds its own transport. Pass one to choose where actors run,
    or to place several optimizers in the same actors. Close a transport that you built. After
    :meth:`close`, :meth:`place` and :meth:`call` raise RuntimeError.

    Args:
        timeout: seconds for each call, including the calls before it; above 0.
        start_timeout: seconds for an actor to start and to build the objects placed on it; above 0,
            ten minutes by default. Both import modules. Calls are sent only after the start. If an
            actor dies while it starts, the error is immediate.
        options: for each worker, options of ``ray.remote(...).options``, such as ``num_cpus``,
            ``resources`` or ``scheduling_strategy``. Other workers have Ray's defaults.

    Raises:
        ImportError: Ray is not installed.
        RuntimeError: ``ray.init`` was not called.
        ValueError: a time-out that is not above 0, or an option that a worker cannot have.

    With Ray::

        ray.init(num_cpus=2)
        transport = RayTransport(timeout=30.0, options={"ps0": {"num_cpus": 2}})
        handle = transport.place("ps0", list, [3, 1, 2]).result()
        transport.call(handle, "sort").result()
        transport.close()
    """

    has_contexts = False
    keeps_order = True

    def __init__(
        self,
        *,
        timeout: float = 60.0,
        start_timeout: float = START_SECONDS,
        options: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self._timeout = check_seconds("timeout", timeout)
        self._start_timeout = check_seconds("start_timeout", start_timeout)
        for worker, own in (options or {}).items():
            if wrong := [name for name in _FORBIDDEN_OPTIONS if name in own]:
                raise ValueError(
                    f"the options of {worker!r} have {' and '.join(wrong)}: leave that out, for an "
                    "actor makes one call after the other, each once, for one transport"
                )
        require_ray()
        self._options = dict(options or {})
        self._actors: dict[str, Any] = {}
        self._starts: dict[str, WorkerFuture | None] = {}
        """The first call of each actor; None after its answer, whose result is not kept."""
        self._forgotten: dict[str, deque[int]] = {}
        self._numbers = itertools.count()
        self._lock = threading.RLock()
        self._closed = False

    def place(self, worker: str, make: Callable[..., Any], *args: Any) -> "Future[Any]":
        """Call ``make(*args)`` in a worker's actor. Return a Future of the result's handle."""
        number = next(self._numbers)

        def build_handle(_: None) -> Handle:
            handle = Handle(worker, number)
            # The next call tells the actor: a finalizer must not send, as it runs at any time.
            weakref.finalize(handle, self._forgotten[worker].append, number).atexit = False
            return handle

        late = (
            f"within {self._start_timeout:g} s it has not started and made what is placed on it; "
            "if it waits for CPUs or other resources (`ray status` says so), give the cluster more "
            "or its options less; if the machine is busy, give a start_timeout above "
            f"{self._start_timeout:g}"
        )
        answer = WorkerFuture(worker, self._start_timeout, late)
        return self._send(answer, worker, "place", number, (make, args), build_handle)

    def call(self, handle: Any, method: str, *args: Any) -> "Future[Any]":
        """Call a method of a placed object in its actor."""
        worker, number = handle.worker, handle.number
        answer = WorkerFuture(worker, self._timeout, f"nothing came within {self._timeout:g} s")
        return self._send(answer, worker, "call", number, (method, args), lambda found: found)

    def close(self) -> None:
        """End the actors after the calls that were sent. Kill actors that did not start in time."""
        with self._lock:
            self._closed = True
            for worker, actor in self._actors.items():
                start = self._starts[worker]
                if start is not None and start.has_timed_out:
                    require_ray().kill(actor)
                else:
                    actor.__ray_terminate__.remote()
            self._actors.clear()

    def _send(
        self,
        answer: WorkerFuture,
        worker: str,
        method: str,
        number: int,
        content: Any,
        convert: Callable[[Any], Any],
    ) -> WorkerFuture:
        """Send a message to an actor. The future gets the converted result."""
        from functional_optim.remote.ray_actor import decode, encode  # noqa: PLC0415  needs Ray

        with self._lock:
            if self._closed:
                raise RuntimeError(
                    f"the worker {worker!r} is closed: make an optimizer with another transport"
                )
            try:
                actor = self._get_actor(worker)
                self._starts.setdefault(worker, answer)
                message, queue = encode(content), self._forgotten[worker]
                forgotten = [queue.popleft() for _ in range(len(queue))]
                sent = getattr(actor, method).remote(number, forgotten, message)
            except Exception as error:  # noqa: BLE001  arguments that cannot be sent, or no Ray
                answer.fail(error)
                return answer

        def on_answer(found: "Future[Any]") -> None:
            if self._starts[worker] is answer:
                self._starts[worker] = None
            try:
                value = decode(found.result())
            except Exception as error:  # noqa: BLE001  the future raises it
                answer.fail(no_answer_error(worker, _first_and_last_line(error), error))
                return
            if isinstance(value, Failure):
                answer.fail(value.error)
            else:
                answer.complete(convert(value))

        sent.future().add_done_callback(on_answer)
        return answer

    def _get_actor(self, worker: str) -> Any:
        """Return the actor of a worker, and start it if necessary."""
        if worker not in self._actors:
            from functional_optim.remote.ray_actor import Actor  # noqa: PLC0415  needs Ray

            kind = require_ray().remote(Actor)
            own = self._options.get(worker, {})
            self._forgotten[worker] = deque()
            self._actors[worker] = kind.options(**own).remote(worker)
        return self._actors[worker]


def resolve_transport(transport: RayTransport | None, start_timeout: float | None) -> RayTransport:
    """Return the given transport, or build one with this time limit."""
    if transport is None:
        return RayTransport(start_timeout=START_SECONDS if start_timeout is None else start_timeout)
    if start_timeout is not None:
        raise ValueError(
            f"start_timeout={start_timeout!r} is for a transport that is made here: give it to "
            "RayTransport(start_timeout=...), or leave transport out"
        )
    return transport


def _first_and_last_line(error: BaseException) -> str:
    """Return the first and the last line of Ray's error. They have the reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(dict.fromkeys([lines[0], lines[-1]])) if lines else type(error).__name__
