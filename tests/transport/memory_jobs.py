"""What the ranks do where everything goes through shared memory; and where it cannot."""

import os
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from sharding.transport import TransportError, lane, make_transport, ordered, segment
from sharding.transport.segment import Address, Segment
from tests.ddp import through_memory

from . import jobs

N = 4001


def again(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """A job of ``jobs``, through memory."""
    with through_memory.through_memory() as seen:
        found = getattr(jobs, name)(**arguments)
    return {"found": found, "operations": seen.operations}


def exchanged(transport: Any, rank: int, size: int) -> bool:
    """One operation of each kind; whether it was right."""
    flat = jobs.gradient(rank, N, torch.float32)
    ranges = jobs.CUTS["backwards, with gaps"](N, size)
    transport.reduce_scatter(flat, ranges, average=True).wait()
    transport.all_gather(flat, ranges).wait()
    right = jobs.reduced([jobs.gradient(q, N, torch.float32) / size for q in range(size)])
    return all(jobs.same(flat[a:b], right[a:b]) for a, b in ranges)


def names() -> list[int]:
    """How many names in a file system the memory of each rank has."""
    with through_memory.through_memory():
        transport: Any = make_transport()
        assert exchanged(transport, dist.get_rank(), dist.get_world_size())
        lanes = [kind.lane for kind in (transport._reducing, transport._gathering)]
        held = [one for made in lanes for one in (made._own, *made._others.values())]
        return [os.fstat(one._held).st_nlink for one in held]


def weak_order() -> dict[str, Any]:
    """On processors that mix the order of what is written."""
    with (
        mock.patch.object(platform, "machine", return_value="aarch64"),
        through_memory.through_memory() as seen,
        warnings.catch_warnings(record=True) as warned,
    ):
        warnings.simplefilter("always")
        ordered._functions.cache_clear()
        transport: Any = make_transport()
        right = exchanged(transport, dist.get_rank(), dist.get_world_size())
        readers = transport._reducing.lane.readers.values()
        functions = all(reader._table._functions is not None for reader in readers)
    ordered._functions.cache_clear()
    said = [str(one.message) for one in warned]
    return {"right": right, "operations": seen.operations, "said": said, "functions": functions}


NO_COMPILER = "this processor (aarch64) may mix the order (there is no C++ compiler here)"


def _not_here(*_: Any) -> None:
    raise FileNotFoundError(2, "No such file or directory", "/proc/1234567/fd/7")


def _no_room(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def without(how: str) -> dict[str, Any]:
    """One rank cannot share memory, or is not to: all use the network, to the same bits."""
    rank, size = dist.get_rank(), dist.get_world_size()
    patches: dict[str, Callable[[], Any]] = {
        "no room": lambda: mock.patch.object(segment.os, "posix_fallocate", _no_room),
        "switched off": lambda: mock.patch.dict(os.environ, {lane.SWITCH: "0"}),
        "no order": lambda: mock.patch.object(lane, "why_not", return_value=NO_COMPILER),
        "elsewhere": lambda: mock.patch.object(segment, "PROCESSES", Path("/nowhere")),
        "another host": lambda: mock.patch.object(Segment, "find", _not_here),
    }
    with through_memory.through_memory() as seen:
        transport = make_transport()
        with (
            warnings.catch_warnings(record=True) as warned,
            patches[how]() if rank == 1 else nullcontext(),
        ):
            warnings.simplefilter("always")
            whole = exchanged(transport, rank, size)
    said = [str(one.message) for one in warned if "the network" in str(one.message)]
    return {"right": whole, "operations": seen.operations, "said": said}


def _stopped(transport: Any) -> None:
    """From now on, this rank launches, and does nothing more."""
    for kind in (transport._reducing, transport._gathering):
        kind.worker.submit(time.sleep, 1000)


def stopped(victim: int, operation: str, dies: bool) -> dict[str, Any]:
    """A rank launches a large operation, and dies, or does not go on with it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(list(range(size)), timeout=timedelta(seconds=20 if dies else 3))
    with through_memory.through_memory():
        transport = make_transport(group)
        ranges = jobs.CUTS["even"](N, size)
        flat = jobs.gradient(rank, N, torch.float32)
        getattr(transport, operation)(flat, ranges).wait()
        if rank == victim:
            _stopped(transport)
        start = time.monotonic()
        work = getattr(transport, operation)(flat, ranges)
        if rank == victim:
            time.sleep(0.5 if dies else 8.0)
            os._exit(0)
        try:
            work.wait()
        except TransportError as error:
            seen = {"error": str(error), "seconds": time.monotonic() - start}
    time.sleep(2.0)  # do not leave before the others have looked
    return seen


def never_came() -> dict[str, Any]:
    """Rank 1 does not come to the first operation: the others name it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(list(range(size)), timeout=timedelta(seconds=3))
    seen: dict[str, Any] = {}
    if rank != 1:
        with through_memory.through_memory():
            transport = make_transport(group)
            try:
                transport.reduce_scatter(torch.ones(N), jobs.CUTS["even"](N, size)).wait()
            except TransportError as error:
                seen["error"] = str(error)
    dist.barrier()
    return seen


def ends_early() -> bool:
    """A rank that has done its part ends; what it has sent is still there for the others."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with through_memory.through_memory():
        transport: Any = make_transport()
        n = through_memory.RING // 4  # of rank 0: it fits
        flat = jobs.gradient(rank, n, torch.float32)
        transport.all_gather(flat.clone(), [(0, n)] + [(n, n)] * (size - 1)).wait()
        slow = transport._gathering.worker
        if rank:
            slow.submit(time.sleep, 2 * lane.LIVES + 1.0)
        work = transport.all_gather(flat, [(0, n)] + [(n, n)] * (size - 1))
        if rank == 0:
            work.wait()
            time.sleep(0.3)
            os._exit(0)
        work.wait()
    return jobs.same(flat, jobs.gradient(0, n, torch.float32))


def out_of_step() -> str:
    """Ranks whose ranges differ."""
    rank = dist.get_rank()
    with through_memory.through_memory():
        transport = make_transport()
        flat = torch.zeros(100)
        cut = 40 + rank
        try:
            transport.all_gather(flat, [(0, cut), (cut, 100)]).wait()
        except TransportError as error:
            return str(error)
    return ""


def forked() -> list[bool]:
    """The child of a fork, which outlives a rank, does not keep its lock."""
    code = (
        "import os, sys, time; from sharding.transport.segment import Segment\n"
        "one = Segment.make(4096)\n"
        "if os.fork() == 0:\n    time.sleep(30); os._exit(0)\n"
        "print(*one.address, flush=True); sys.stdin.read(); os._exit(0)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        address = Address(*map(int, process.stdout.readline().split()))
        seen = Segment.find(address, 4096)
        alive = seen.has_owner
        process.stdin.close()
        process.wait()
        found = [alive, seen.has_owner]
        os.killpg(process.pid, 9)
    return found
