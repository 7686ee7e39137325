"""Process of a rank in a pool: it runs the functions that it is sent, each in a new group."""

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
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from sharding.testing.results import Outcome
from sharding.testing.where import tell_by

MEETING_SECONDS = 300.0
"""For how long ranks wait for one another before a call begins, on a busy machine."""

TOGETHER_SECONDS = 5.0
"""For how long a rank that is done keeps its connections for others that are not."""

GLANCE = timedelta(milliseconds=50)

LAST_GROUPS = 4
"""So many groups of earlier calls are held on to. A communication hook's callback may be the last
to hold its group; dropped in one of that group's own threads, it would wait for that very thread.
"""


BEGINNING = "the beginning"
"""Where a rank is that has begun with a call."""


class RankCall(NamedTuple):
    """A function for the first ``ranks`` ranks."""

    function: bytes
    """It and its arguments, pickled: what cannot be imported here is an outcome, not a death."""
    store: str
    """The file through which the ranks find one another."""
    ranks: int
    group_seconds: float


def one_has_died(store: str) -> Path:
    """Mark that a rank has died, so that no other rank waits for it.

    Args:
        store: of the call.
    """
    return Path(f"{store}.died")


def serve(pipe: Connection, rank: int) -> None:
    """Answer calls until nobody is left who could send one."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever sent the call ends it
    torch.set_num_threads(1)  # OMP_NUM_THREADS does not reach all pools
    warnings.simplefilter("error")
    tell_by(lambda place: pipe.send(("at", place)))
    gc.collect()
    gc.freeze()  # modules stay: later collections need not look at them
    kept: collections.deque[Any] = collections.deque(maxlen=LAST_GROUPS)
    while True:
        try:
            call: RankCall = pipe.recv()
        except EOFError:
            os._exit(0)  # with the threads of all those groups
        pipe.send(("at", BEGINNING))
        outcome = _answered(call, rank, kept)
        try:
            pipe.send(("done", outcome))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            text = f"what rank {rank} returned cannot be sent: {error}"
            pipe.send(("done", Outcome(error=text)))


def _answered(call: RankCall, rank: int, kept: "collections.deque[Any]") -> Outcome:
    store = dist.FileStore(call.store, call.ranks)
    try:
        _meet(store, call, rank)
        kept.append(dist.group.WORLD)
    except Exception as error:  # noqa: BLE001  the others did not come
        return Outcome(error=f"{type(error).__name__}: {error}", traceback=traceback.format_exc())
    outcome = _outcome(call)
    _end_together(store, call, rank, well=outcome.error is None)
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
    gc.freeze()  # what is imported by now stays, too, and is large: torch._dynamo, for one
    return outcome


def _meet(store: dist.Store, call: RankCall, rank: int) -> None:
    """A process group of this call's own, once all ranks have come to it."""
    store.set(f"here {rank}", "")
    others = [f"here {other}" for other in range(call.ranks)]
    store.wait(others, timedelta(seconds=MEETING_SECONDS))
    seconds = timedelta(seconds=call.group_seconds)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=call.ranks, timeout=seconds)


def _outcome(call: RankCall) -> Outcome:
    start = time.monotonic()
    try:
        function, given = pickle.loads(call.function)  # noqa: S301  from who started this
        value = function(**given)
    except Exception as error:  # noqa: BLE001  who waits decides what to make of it
        text = f"{type(error).__name__}: {error}"
        return Outcome(error=text, traceback=traceback.format_exc())
    return Outcome(value, seconds=time.monotonic() - start)


def _end_together(store: dist.Store, call: RankCall, rank: int, *, well: bool) -> None:
    """Keep connections open while others may still be making theirs to this rank.

    A rank with little to do would otherwise close them before the other end has seen them open.
    """
    store.set(f"done {rank}", "")
    until = time.monotonic() + TOGETHER_SECONDS
    while well and time.monotonic() < until and not one_has_died(call.store).exists():
        with contextlib.suppress(RuntimeError):  # not all have come yet
            store.wait([f"done {other}" for other in range(call.ranks)], GLANCE)
            return
