"""Jobs of ranks in trouble: one dies, never comes, stops, or asks for another size.

Ranks meet at a file store, not over the network, so that they can meet after a rank has died.
"""

import functools
import json
import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from sharding.transport import TransportError, make_transport
from sharding.transport.shared_slots import PieceExchange, SharedSlots
from tests.ddp.through_memory import through_memory

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


def memory_only(job: Callable[..., Any]) -> Callable[..., Any]:
    """Run a job whose operations use shared memory."""

    @functools.wraps(job)
    def run(*args: Any, **kwargs: Any) -> Any:
        with through_memory():
            return job(*args, **kwargs)

    return run


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


@memory_only
def absent_in_memory(never: int) -> dict[str, str]:
    """Start operations through memory that one rank never joins; return the errors."""
    started = {operation: Launch(operation, SHORT, done=1) for operation in OPERATIONS}
    meet("begun")
    seen: dict[str, str] = {}
    if dist.get_rank() != never:
        works = {operation: one.launch() for operation, one in started.items()}
        meet("launched", [rank for rank in range(dist.get_world_size()) if rank != never])
        seen = {key: one.error(works[key].wait)["error"] for key, one in started.items()}
    meet("looked")
    return seen


@memory_only
def died_in_memory(victim: int, folder: str) -> None:
    """Kill one rank before operations through memory; all other ranks write their errors."""
    started = {operation: Launch(operation, LONG, done=1) for operation in OPERATIONS}
    meet("begun")
    rank = dist.get_rank()
    if rank == victim:
        os._exit(0)
    seen = {}
    for operation, one in started.items():
        meet(operation, [other for other in range(dist.get_world_size()) if other != victim])
        seen[operation] = one.error(lambda one=one: one.launch().wait())["error"]
    Path(folder, str(rank)).write_text(json.dumps(seen))
    os._exit(0)


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


@memory_only
def ends_early(last: int) -> list[bool]:
    """End one rank after an operation, while the other ranks have not read its last piece."""
    one = Launch("all_gather", LONG, done=1)
    meet("begun")
    store = dist.distributed_c10d._get_default_store()
    if one.rank == last:
        store.set("process", str(os.getpid()))
        one.launch().wait()
        os._exit(0)
    process = Path("/proc", store.get("process").decode())
    run = SharedSlots.run

    def run_and_read_late(slots: SharedSlots, exchange: PieceExchange) -> None:
        take = exchange.take

        def take_late(piece: slice, received: Mapping[int, Tensor]) -> None:
            if piece == exchange.pieces[-1]:
                # The last rank is a zombie until its parent looks.
                _wait_until(
                    lambda: not process.exists() or " (zombie)" in (process / "status").read_text()
                )
            take(piece, received)

        exchange.take = take_late
        run(slots, exchange)

    with mock.patch.object(SharedSlots, "run", run_and_read_late):
        one.launch().wait()
    meet("taken", [other for other in range(dist.get_world_size()) if other != last])
    return [
        same(one.flat[start:stop], gradient(other, N, torch.float32)[start:stop])
        for other, (start, stop) in enumerate(one.ranges)
    ]


def _wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + LONG.total_seconds()
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)


@memory_only
def out_of_step() -> list[str]:
    """Run a gather on ranks whose ranges differ, and one more; return both errors."""
    rank = dist.get_rank()
    transport = make_transport()
    flat = torch.zeros(100)
    found = []
    for cut in (40 + rank, 40):
        try:
            transport.all_gather(flat, [(0, cut), (cut, 100)]).wait()
        except TransportError as error:
            found.append(str(error))
    return found
