"""Workers that are Ray actors: processes on this machine, or on any of a cluster."""

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from functional_optim.frontends.local_optimizer import Foreign
from functional_optim.frontends.recipe import Recipe
from functional_optim.remote.answers import Answer, Failure, no_answer
from functional_optim.remote.ray_or_error import ray_or_error
from functional_optim.remote.transport import START_SECONDS, check_seconds
from functional_optim.remote.worker import Share, WorkerOptimizer

_NOT_OPTIONS = (
    "allow_out_of_order_execution",
    "concurrency_groups",
    "get_if_exists",
    "max_concurrency",
    "max_restarts",
    "max_task_retries",
)
"""By these, calls would overlap or change their order, a step be made twice, an actor be another
transport's, or go on without its parameters."""


class Handle:
    """Handle of an object in an actor."""

    def __init__(self, worker: str, number: int) -> None:
        self.worker, self.number = worker, number


class RayTransport:
    """Transport with an actor for each worker, started when something is first placed on it.

    Each call is one message with one flat buffer, however many tensors it has. A worker makes one
    call after the other, in the order in which they are sent. An actor that dies, or is killed, and
    one that gives no answer in time, are errors that name the worker. An actor that died is not
    started anew, for its parameters are lost: make another transport, and load what was saved.

    ``DistributedOptimizer.over_ray`` makes one of its own; give it one to choose where actors run,
    or to place several optimizers in the same actors. Who made it closes it.

    Args:
        timeout: seconds for each call, those that it has to wait for among them; above 0.
        start_timeout: seconds for an actor to start and to make what is placed on it; above 0, ten
            minutes by default. Both import what they need, and a call is only sent to what is
            there. An actor that dies while it starts is an error at once.
        options: for each worker, what ``ray.remote(...).options`` takes, such as ``num_cpus``,
            ``resources`` or ``scheduling_strategy``. Those that are not named have Ray's defaults.

    Raises:
        ImportError: Ray is not installed.
        RuntimeError: ``ray.init`` was not called.
        ValueError: a time-out that is not above 0; an option that a worker cannot have.

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
            if wrong := [name for name in _NOT_OPTIONS if name in own]:
                raise ValueError(
                    f"the options of {worker!r} have {' and '.join(wrong)}: leave that out, for an "
                    "actor makes one call after the other, each once, for one transport"
                )
        ray_or_error()
        self._options = dict(options or {})
        self._actors: dict[str, Any] = {}
        self._starts: dict[str, Answer] = {}
        self._forgotten: dict[str, deque[int]] = {}
        self._numbers = itertools.count()
        self._lock = threading.RLock()
        self._closed = False

    def place(self, worker: str, make: Callable[..., Any], *args: Any) -> "Future[Any]":
        """Call ``make(*args)`` in a worker's actor; a Future of a handle to what it returns.

        Raises:
            RuntimeError: this transport is closed.
        """
        number = next(self._numbers)

        def placed(_: None) -> Handle:
            made = Handle(worker, number)
            # Its actor is told with the next call; nothing may be sent while Python collects.
            weakref.finalize(made, self._forgotten[worker].append, number).atexit = False
            return made

        answer = Answer(worker, self._start_timeout, _not_started(self._start_timeout))
        return self._sent(answer, worker, "place", number, (make, args), placed)

    def call(self, handle: Any, method: str, *args: Any) -> "Future[Any]":
        """Call a method of what was placed, in its actor.

        Raises:
            RuntimeError: this transport is closed.
        """
        worker, number = handle.worker, handle.number
        answer = Answer(worker, self._timeout, f"nothing came within {self._timeout:g} s")
        return self._sent(answer, worker, "call", number, (method, args), lambda found: found)

    def close(self) -> None:
        """End the actors, once they have made the calls that were sent.

        One that did not start in time is killed.
        """
        with self._lock:
            self._closed = True
            for worker, actor in self._actors.items():
                if self._starts[worker].is_late:
                    ray_or_error().kill(actor)
                else:
                    actor.__ray_terminate__.remote()
            self._actors.clear()

    def _sent(
        self,
        answer: Answer,
        worker: str,
        method: str,
        number: int,
        content: Any,
        made: Callable[[Any], Any],
    ) -> Answer:
        """Send a message to an actor; the Answer is what is made of the one that comes back."""
        from functional_optim.remote.ray_message import decoded, encoded  # noqa: PLC0415  wants Ray

        with self._lock:
            if self._closed:
                raise RuntimeError(
                    f"the worker {worker!r} is closed: make an optimizer with another transport"
                )
            try:
                actor = self._actor(worker)
                self._starts.setdefault(worker, answer)
                forgotten = self._left(worker)
                sent = getattr(actor, method).remote(number, forgotten, encoded(content))
            except Exception as error:  # noqa: BLE001  it cannot be sent, or Ray was shut down
                answer.fail(error)
                return answer

        def answered(found: "Future[Any]") -> None:
            try:
                value = decoded(found.result())
            except Exception as error:  # noqa: BLE001  handed on to who waits
                answer.fail(no_answer(worker, _told(error), error))
                return
            if isinstance(value, Failure):
                answer.fail(value.error)
            else:
                answer.give(made(value))

        sent.future().add_done_callback(answered)
        return answer

    def _actor(self, worker: str) -> Any:
        """The actor of a worker; it is started if there is none yet."""
        if worker not in self._actors:
            from functional_optim.remote.ray_actor import Actor  # noqa: PLC0415  wants Ray

            kind = ray_or_error().remote(Actor)
            own = self._options.get(worker, {})
            self._forgotten[worker] = deque()
            self._actors[worker] = kind.options(**own).remote(worker)
        return self._actors[worker]

    def _left(self, worker: str) -> list[int]:
        """Return the objects of an actor that nothing refers to any more."""
        own = self._forgotten[worker]
        return [own.popleft() for _ in range(len(own))]


def given_or_made(transport: RayTransport | None, start_timeout: float | None) -> RayTransport:
    """A transport that was given, or one that is made with this limit, or that of most.

    Raises:
        ValueError: both are given.
        ImportError, RuntimeError, ValueError: as for :class:`RayTransport`.
    """
    if transport is None:
        return RayTransport(start_timeout=START_SECONDS if start_timeout is None else start_timeout)
    if start_timeout is not None:
        raise ValueError(
            f"start_timeout={start_timeout!r} is for a transport that is made here: give it to "
            "RayTransport(start_timeout=...), or leave transport out"
        )
    return transport


def make_in_actor(found: Recipe | Foreign, shares: Sequence[Share]) -> WorkerOptimizer:
    """The optimizer over a worker's parameters, in its actor."""
    from functional_optim.remote.ray_actor import make_worker  # noqa: PLC0415  wants Ray

    return make_worker(found, shares)


def _not_started(seconds: float) -> str:
    """Return the error for a caller whose placement timed out."""
    return (
        f"within {seconds:g} s it has not started and made what is placed on it; if it waits for "
        "CPUs or other resources (`ray status` says so), give the cluster more or its options "
        f"less; if the machine is busy, give a start_timeout above {seconds:g}"
    )


def _told(error: BaseException) -> str:
    """Return the first and the last line of Ray's error, which has the reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(dict.fromkeys([lines[0], lines[-1]])) if lines else type(error).__name__
