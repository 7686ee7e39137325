"""Process of a rank in a pool: it runs functions, each in a new process group."""

import collections
import contextlib
import faulthandler
import gc
import os
import pickle
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

INIT_SECONDS = 300.0
"""How long ranks wait for one another before a call, on a busy machine."""

OPEN_SECONDS = 5.0
"""How long a finished rank keeps its connections open for other ranks."""

GLANCE = timedelta(milliseconds=50)

LAST_GROUPS = 4
"""Number of groups of earlier calls that are kept alive. The last reference to a group may be in a
callback of a communication hook, which runs in a thread of the group. If the group were deleted
there, the thread would wait for itself.
"""

BEGINNING = "the beginning"
"""The position of a rank that has begun a call."""

_LISTENERS: list[Callable[[str], object]] = []


def at(place: str) -> None:
    """Report the position of this rank. A report shows progress, and errors name the last position.

    Outside a :class:`~sharding.testing.RankPool` it does nothing.
    """
    for listener in _LISTENERS:
        listener(place)


class Outcome(NamedTuple):
    """Outcome of a call on one rank."""

    value: Any = None
    """The return value of the function."""
    error: str | None = None
    """``Type: message`` of the function's exception, or the reason why there is no result."""
    traceback: str = ""
    """The traceback of the exception."""
    seconds: float = 0.0
    """How long the function ran."""

    def result(self) -> Any:
        """Return the value that the function returned.

        Raises:
            AssertionError: the function did not return; has the reason.
        """
        assert self.error is None, f"{self.error}\n{self.traceback}"
        return self.value


class RankCall(NamedTuple):
    """Call of a function on the first ``ranks`` ranks."""

    function: bytes
    """The function and its arguments, pickled, so that an import error is the rank's outcome."""
    store: str
    """The file of the store through which the ranks connect."""
    ranks: int
    group_seconds: float


def death_marker(store: str) -> Path:
    """Return the file that marks the death of a rank, so that other ranks do not wait for it."""
    return Path(f"{store}.died")


def serve(pipe: Connection, rank: int) -> None:
    """Run calls until the pool closes the pipe."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool ends this process
    torch.set_num_threads(1)  # OMP_NUM_THREADS does not apply to all thread pools
    warnings.simplefilter("error")
    _LISTENERS[:] = [lambda place: pipe.send(("at", place))]
    gc.collect()
    gc.freeze()  # modules stay alive, so later collections can skip them
    gc.enable()
    groups: collections.deque[Any] = collections.deque(maxlen=LAST_GROUPS)
    while True:
        try:
            call: RankCall = pipe.recv()
        except EOFError:
            os._exit(0)  # also ends the threads of the kept groups
        pipe.send(("at", BEGINNING))
        outcome = _run_call(call, rank, groups)
        try:
            pipe.send(("done", outcome))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            text = f"what rank {rank} returned cannot be sent: {error}"
            pipe.send(("done", Outcome(error=text)))


def _run_call(call: RankCall, rank: int, groups: "collections.deque[Any]") -> Outcome:
    store = dist.FileStore(call.store, call.ranks)
    try:
        _init_group(store, call, rank)
        groups.append(dist.group.WORLD)
    except Exception as error:  # noqa: BLE001  other ranks did not come
        return _failure(error)
    start = time.monotonic()
    try:
        function, given = pickle.loads(call.function)  # noqa: S301  from the pool
        value = function(**given)
    except Exception as error:  # noqa: BLE001  the caller of the pool handles it
        outcome = _failure(error)
    else:
        outcome = Outcome(value, seconds=time.monotonic() - start)
    store.set(f"done {rank}", "")
    if outcome.error is None:
        _wait_for_other_ranks(store, call)
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
    gc.freeze()  # modules that the call has imported stay alive too, such as torch._dynamo
    return outcome


def _failure(error: Exception) -> Outcome:
    return Outcome(error=f"{type(error).__name__}: {error}", traceback=traceback.format_exc())


def _init_group(store: dist.Store, call: RankCall, rank: int) -> None:
    """Initialize the process group of a call, once all ranks have come."""
    store.set(f"here {rank}", "")
    keys = [f"here {other}" for other in range(call.ranks)]
    store.wait(keys, timedelta(seconds=INIT_SECONDS))
    seconds = timedelta(seconds=call.group_seconds)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=call.ranks, timeout=seconds)


def _wait_for_other_ranks(store: dist.Store, call: RankCall) -> None:
    """Keep connections open until the other ranks are done: they may still be connecting."""
    deadline = time.monotonic() + OPEN_SECONDS
    while time.monotonic() < deadline and not death_marker(call.store).exists():
        with contextlib.suppress(RuntimeError):  # some ranks are not done yet
            store.wait([f"done {other}" for other in range(call.ranks)], GLANCE)
            return
