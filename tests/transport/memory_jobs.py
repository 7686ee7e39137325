"""Jobs of the ranks with shared memory, and without."""

import os
import platform
import signal
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from sharding.transport import atomics, make_transport, ring_channel, segment
from sharding.transport.segment import SharedSegment
from tests.ddp.through_memory import through_memory

from .buffers import CUTS, gradient, reduced, same

N = 1001


def _exchanged(transport: Any) -> bool:
    """Run one operation of each kind, and return True if the results are right."""
    rank, size = transport.rank, transport.size
    flat = gradient(rank, N, torch.float32)
    ranges = CUTS["backwards, with gaps"](N, size)
    transport.reduce_scatter(flat, ranges, average=True).wait()
    transport.all_gather(flat, ranges).wait()
    right = reduced([gradient(q, N, torch.float32) / size for q in range(size)])
    return all(same(flat[a:b], right[a:b]) for a, b in ranges)


def names() -> list[int]:
    """Return the number of file names of each rank's shared memory."""
    with through_memory():
        transport: Any = make_transport()
        assert _exchanged(transport)
        channels = [kind.channel for kind in (transport._reducing, transport._gathering)]
        held = [one for made in channels for one in (made._own, *made._others.values())]
        return [os.fstat(one._descriptor).st_nlink for one in held]


def weak_order() -> dict[str, Any]:
    """Run on a simulated processor that may reorder writes."""
    with (
        mock.patch.object(platform, "machine", return_value="aarch64"),
        through_memory() as seen,
        warnings.catch_warnings(record=True) as warned,
    ):
        warnings.simplefilter("always")
        atomics._functions.cache_clear()
        transport: Any = make_transport()
        right = _exchanged(transport)
        readers = transport._reducing.channel.readers.values()
        functions = all(reader._table._functions is not None for reader in readers)
    atomics._functions.cache_clear()
    said = [str(one.message) for one in warned]
    return {"right": right, "operations": seen.operations, "said": said, "functions": functions}


NO_COMPILER = "this processor (aarch64) may mix the order (there is no C++ compiler here)"


def _not_here(*_: Any) -> None:
    raise FileNotFoundError(2, "No such file or directory", "/proc/1234567/fd/7")


def _no_room(*_: Any) -> None:
    raise OSError(28, "No space left on device")


WITHOUT: dict[str, Callable[[], Any]] = {
    "no room": lambda: mock.patch.object(segment.os, "posix_fallocate", _no_room),
    "no order": lambda: mock.patch.object(
        ring_channel, "unsupported_reason", return_value=NO_COMPILER
    ),
    "switched off": lambda: mock.patch.dict(os.environ, {ring_channel.SWITCH: "0"}),
    "elsewhere": lambda: mock.patch.object(segment, "PROCESSES", Path("/nowhere")),
    "another host": lambda: mock.patch.object(SharedSegment, "attach", _not_here),
}


def without() -> dict[str, dict[str, Any]]:
    """Prevent one rank from sharing memory: all ranks must use the network, with equal results."""
    found = {}
    for name, patched in WITHOUT.items():
        with through_memory() as seen:
            transport = make_transport()
            with (
                warnings.catch_warnings(record=True) as warned,
                patched() if transport.rank == 1 else nullcontext(),
            ):
                warnings.simplefilter("always")
                right = _exchanged(transport)
        said = [str(one.message) for one in warned if "the network" in str(one.message)]
        found[name] = {"right": right, "operations": seen.operations, "said": said}
    return found


def killed_before_others_know(file: str) -> None:
    """Kill a rank after it has made its memory, and before it tells the other ranks."""

    def killed(*_: Any) -> None:
        maps = Path("/proc/self/maps").read_text().splitlines()
        mapped = [line.split(maxsplit=5)[5] for line in maps if "functional-optim-" in line]
        Path(file).write_text("\n".join(mapped))
        os.kill(os.getpid(), signal.SIGKILL)

    ring_channel._gather_numbers = killed
    world = dist.group.WORLD
    assert world is not None
    ring_channel.create_channel(world)
