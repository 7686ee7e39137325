"""Jobs of ranks in trouble: one dies, never comes, stops, or asks for another size.

Ranks meet at a file store, not over the network, so that they can meet after a rank has died.
"""

import json
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sharding.transport import TransportError, make_transport
from tests.ddp.through_memory import RING, through_memory

from .buffers import CUTS, gradient, same

OPERATIONS = ("reduce_scatter", "all_gather")
N = 4001
SHORT = timedelta(seconds=3)
LONG = timedelta(seconds=300)
"""Timeout that is longer than the time for which a pool waits after a rank has died."""


def meet(where: str, ranks: list[int] | None = None) -> None:
    """Wait until these ranks, or all ranks, have come to this point."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{where} {dist.get_rank()}", "")
    store.wait([f"{where} {rank}" for rank in ranks or range(dist.get_world_size())], LONG)


def new_group(timeout: timedelta) -> Any:
    return dist.new_group(list(range(dist.get_world_size())), timeout=timeout)


class Launch:
    """Operation on a new transport, after ``done`` runs of the operation."""

    def __init__(self, operation: str, timeout: timedelta, *, done: int) -> None:
        self.rank, size = dist.get_rank(), dist.get_world_size()
        self.transport: Any = make_transport(new_group(timeout))
        self.ranges = CUTS["even"](N, size)
        self.flat = gradient(self.rank, N, torch.float32)
        self.launch: Callable[[], Any] = lambda: getattr(self.transport, operation)(
            self.flat, self.ranges
        )
        for _ in range(done):
            self.launch().wait()

    def error(self, work: Callable[[], Any]) -> dict[str, str]:
        """Run work; return the text and the cause of its TransportError, or nothing without one."""
        try:
            work()
        except TransportError as error:
            return {"error": str(error), "cause": type(error.__cause__).__name__}
        return {}


def absent(never: int) -> dict[str, Any]:
    """Start operations that one rank never joins; return the errors after the timeout.

    Each waiting rank has its own groups, in which other ranks have a long timeout. gloo
    disconnects a rank that waits for one that gave up, so one group would make the results depend
    on luck.
    """
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    started = {
        (waiting, operation): Launch(operation, SHORT if waiting == rank else LONG, done=0)
        for waiting in ranks
        if waiting != never
        for operation in OPERATIONS
    }
    if rank == never:
        meet("launched")
        meet("looked")
        return {}
    works = {key: one.launch() for key, one in started.items()}
    meet("launched")  # all messages are sent before any rank waits for them
    seen: dict[str, Any] = {}
    for operation in OPERATIONS:
        one = started[rank, operation]
        own = slice(*one.ranges[rank])
        seen[operation] = one.error(works[rank, operation].wait)
        seen[operation]["kept"] = same(one.flat[own], gradient(rank, N, torch.float32)[own])
    meet("looked")
    return seen


def killed(victim: int, folder: str) -> None:
    """Kill one rank; all other ranks write their errors to files in the folder, and end.

    A second wait must raise the same error.
    """
    started = {operation: Launch(operation, LONG, done=1) for operation in OPERATIONS}
    meet("begun")
    rank = dist.get_rank()
    if rank == victim:
        os._exit(0)
    seen: dict[str, Any] = {}
    for operation, one in started.items():
        # A gathered piece may pass through other ranks, and a rank with an error ends. So all ranks
        # meet before each operation.
        meet(operation, [other for other in range(dist.get_world_size()) if other != victim])
        texts: list[str] = []

        def wait(one: Launch = one, texts: list[str] = texts) -> None:
            work = one.launch()
            try:
                work.wait()
            except RuntimeError as error:
                texts.append(str(error))
            work.wait()

        seen[operation] = {**one.error(wait), "texts": texts}
    Path(folder, str(rank)).write_text(json.dumps(seen))
    os._exit(0)


def known() -> dict[str, Any]:
    """Kill rank 2, and let rank 0 know before it launches, while rank 1 waits for rank 0."""
    one = Launch("reduce_scatter", LONG, done=1)
    work = one.launch() if one.rank == 1 else None
    meet("begun")
    if one.rank == 2:
        os._exit(0)
    if one.rank == 0:
        _until_it_is_known(one.transport.group)
    seen = one.error(one.launch if work is None else work.wait)
    meet("told", [0, 1])  # each rank lives until the other one has its error
    return seen


def _until_it_is_known(group: Any) -> None:
    """Wait until gloo refuses to send to rank 2."""
    while True:
        try:
            dist.isend(torch.zeros(1), group=group, group_dst=2, tag=7)
        except RuntimeError:
            return
        time.sleep(0.01)


# --------------------------------------------------------------------------------- through memory


def stopped(victim: int, dies: bool) -> dict[str, Any]:
    """Launch large operations that one rank does not continue; it dies, or it stops."""
    others = [rank for rank in range(dist.get_world_size()) if rank != victim]
    goes_on = threading.Event()
    with through_memory():
        timeout = LONG if dies else SHORT
        started = {operation: Launch(operation, timeout, done=1) for operation in OPERATIONS}
        meet("begun")
        if dist.get_rank() == victim:
            for one in started.values():
                for kind in (one.transport._reducing, one.transport._gathering):
                    kind.worker.submit(goes_on.wait)
        works = {operation: one.launch() for operation, one in started.items()}
        meet("launched")
        if dist.get_rank() == victim:
            if dies:
                os._exit(0)
            meet("looked")
            for work in works.values():
                assert work._job.cancel()
            goes_on.set()
            return {}
        seen = {operation: one.error(works[operation].wait) for operation, one in started.items()}
    meet("looked", others if dies else None)
    return seen


def never_came(never: int) -> dict[str, str]:
    """Skip the first operation on one rank; ranks decide in this operation if they share memory."""
    group = new_group(SHORT)
    seen: dict[str, str] = {}
    if dist.get_rank() != never:
        with through_memory():
            transport = make_transport(group)
            try:
                transport.reduce_scatter(torch.ones(N), CUTS["even"](N, transport.size)).wait()
            except TransportError as error:
                seen["error"] = str(error)
    meet("looked")
    return seen


def ends_early() -> bool:
    """End a rank after its last operation; other ranks must still get the data that it sent."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with through_memory():
        transport: Any = make_transport(new_group(LONG))
        n = RING // 4  # number of elements of rank 0, which fit into the ring
        flat, ranges = gradient(rank, n, torch.float32), [(0, n)] + [(n, n)] * (size - 1)
        transport.all_gather(flat.clone(), ranges).wait()
        meet("begun")
        slow = transport._gathering
        if rank:
            slow.worker.submit(_wait_until, lambda: not slow.channel._others[0].has_owner)
        work = transport.all_gather(flat, ranges)
        meet("launched")
        if rank == 0:
            work.wait()
            os._exit(0)
        work.wait()
    meet("taken", list(range(1, size)))
    return same(flat, gradient(0, n, torch.float32))


def _wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + LONG.total_seconds()
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)


def out_of_step() -> str:
    """Run a gather on ranks whose ranges differ, and return the error."""
    rank = dist.get_rank()
    with through_memory():
        transport = make_transport()
        flat = torch.zeros(100)
        cut = 40 + rank
        try:
            transport.all_gather(flat, [(0, cut), (cut, 100)]).wait()
        except TransportError as error:
            return str(error)
    return ""
