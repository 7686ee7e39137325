"""Jobs of the ranks with shared memory, and without."""

import os
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from sharding.transport import make_transport, segment, shared_slots
from sharding.transport.messages import MessageTags
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
    """Return the number of file names of this rank's shared memory."""
    with through_memory():
        transport: Any = make_transport()
        assert _exchanged(transport)
        every = [
            one
            for kind in (transport._reducing, transport._gathering)
            for one in kind.slots.segments
        ]
        assert len(every) == 2 * transport.size
        return [os.fstat(one.address.descriptor).st_nlink for one in every if _is_own(one)]


def _is_own(one: SharedSegment) -> bool:
    return one.address.process == os.getpid()


def waited_in_another_order() -> bool:
    """Wait for operations of both kinds, of one to many pieces, in an order of each rank."""
    with through_memory() as seen:
        transport: Any = make_transport()
        rank, size = transport.rank, transport.size
        flats, works = [], []
        for number in range(8):
            flats.append(gradient(rank, 300 * (number + 1), torch.float32))
            operation = transport.reduce_scatter if number % 2 else transport.all_gather
            works.append(operation(flats[-1], CUTS["even"](len(flats[-1]), size)))
            if rank and number == 3:
                works[3].wait()
        for number in sorted(range(8), key=lambda at: at * (2 * rank - 1) % 8):
            works[number].wait()
        assert seen.operations == 8
    return all(map(_is_right, range(8), flats))


def read_late() -> bool:
    """Let one rank read late what the others write; they must not fill a slot again before."""
    wait = shared_slots.wait_messages

    def wait_longer(*args: Any) -> None:
        wait(*args)
        time.sleep(0.003)

    with through_memory(), ExitStack() as stack:
        transport: Any = make_transport()
        if transport.rank == 1:
            stack.enter_context(mock.patch.object(shared_slots, "wait_messages", wait_longer))
        flats = [gradient(transport.rank, 6000, torch.float32) for _ in range(4)]
        for number, flat in enumerate(flats):
            operation = transport.reduce_scatter if number % 2 else transport.all_gather
            operation(flat, CUTS["even"](len(flat), transport.size)).wait()
    return all(map(_is_right, range(4), flats))


def _is_right(number: int, flat: Tensor) -> bool:
    """Return True if a gather (even numbers) or a sum has the right result on this rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    every = [gradient(source, len(flat), torch.float32) for source in range(size)]
    ranges = CUTS["even"](len(flat), size)
    if number % 2:
        own = slice(*ranges[rank])
        return same(flat[own], reduced(every)[own])
    return all(same(flat[a:b], one[a:b]) for one, (a, b) in zip(every, ranges, strict=True))


def _not_here(*_: Any) -> None:
    raise FileNotFoundError(2, "No such file or directory", "/proc/1234567/fd/7")


def _no_room(*_: Any) -> None:
    raise OSError(28, "No space left on device")


WITHOUT: dict[str, Callable[[], Any]] = {
    "no room": lambda: mock.patch.object(segment.os, "posix_fallocate", _no_room),
    "switched off": lambda: mock.patch.dict(os.environ, {shared_slots.SWITCH: "0"}),
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

    shared_slots._gather_numbers = killed
    world = dist.group.WORLD
    assert world is not None
    shared_slots.share_memory(world, MessageTags(world))
