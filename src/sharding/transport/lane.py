"""Operations of one kind over rings: what is to be sent, in order, and waiting for the others.

Nobody sends by itself: a rank fills its ring when an operation is launched, as far as there is
room, and goes on with it whenever it waits. So a rank that waits for another never keeps what that
one waits for.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from sharding.transport.gloo import GlooTransport
from sharding.transport.messages import CPU, Kind, Message, absent, lost
from sharding.transport.ordered_sum import divided
from sharding.transport.peers import GroupRank, timeout_of
from sharding.transport.protocol import TransportError
from sharding.transport.ring import ALIGNMENT, RingReader, RingWriter, Shape
from sharding.transport.segment import Segment, new_name

SHORTEST, LONGEST = 5e-5, 1e-3
"""Seconds between two looks at what others have done, at first and at most."""
LIVES = 0.25
"""Seconds between two looks at whether the others live."""


RING = 4 << 20
"""Bytes of a rank's ring: so little that it stays in the processor's cache."""
SLOTS, SMALLEST_CHUNK, LARGEST_CHUNK = 4, 1 << 16, 1 << 20

Step = Callable[[], bool | None]
"""Takes what has come: True where that was something, None when all has come and all was sent."""


class _Sending(NamedTuple):
    """A chunk to be sent."""

    piece: Tensor
    readers: Sequence[int]
    divisor: int


class Lane:
    """This rank's ring, and those of all others.

    Args:
        group: whose ranks.
        shape: of the rings.
        segments: of all ranks, this one's among them.
    """

    def __init__(self, group: dist.ProcessGroup, shape: Shape, segments: Sequence[Segment]) -> None:
        rank = group.rank()
        self.chunk = shape.chunk
        self.readers = {
            peer: RingReader(one.memory, shape, rank)
            for peer, one in enumerate(segments)
            if peer != rank
        }
        self._group = group
        self._segments = segments
        self._writer = RingWriter(segments[rank].memory, shape)
        self._queue: deque[_Sending] = deque()
        self._lock = threading.Lock()
        self._queued = 0
        self._sent = 0

    def send(self, pieces: Iterable[tuple[Tensor, Sequence[int]]], divisor: int) -> int:
        """Send pieces of at most one chunk to ranks, once there is room; divided on the way.

        Returns:
            The number of the last, to ask :meth:`has_sent` with.
        """
        with self._lock:
            before = len(self._queue)
            self._queue.extend(_Sending(piece, ranks, divisor) for piece, ranks in pieces)
            self._queued += len(self._queue) - before
            return self._queued

    def has_sent(self, number: int) -> bool:
        """Whether a piece, and all before it, are in the ring."""
        return self._sent >= number

    def push(self) -> bool:
        """Send what there is room for; whether that was anything."""
        if not self._queue or not self._lock.acquire(blocking=False):
            return False
        try:
            moved = False
            while self._queue:
                slot = self._writer.free()
                if slot is None:
                    break
                piece, readers, divisor = self._queue.popleft()
                room = self._writer.chunks[slot][: piece.numel() * piece.element_size()]
                if divisor == 1:
                    room.view(piece.dtype).copy_(piece)
                else:
                    divided(piece, divisor, room.view(piece.dtype))
                self._writer.publish(slot, readers)
                self._sent += 1
                moved = True
            return moved
        finally:
            self._lock.release()

    def until_done(self, what: str, step: Step, messages: Sequence[Message]) -> None:
        """Send and take until an operation is done.

        Args:
            what: the operation, for errors.
            step: takes what has come.
            messages: all of the operation, for errors.

        Raises:
            TransportError: names the ranks that died or did not do their part in time.
        """
        pause, start = SHORTEST, time.monotonic()
        timeout, looked = timeout_of(self._group, CPU).total_seconds(), start
        while True:
            sent = self.push()
            took = step()
            if took is None:
                return
            if sent or took:
                pause, start = SHORTEST, time.monotonic()
                continue
            now = time.monotonic()
            if now - looked > LIVES:
                looked = now
                self._check_lives(what, messages)
            if now - start > timeout:
                raise TransportError(absent(what, self._group, messages, now - start))
            time.sleep(pause)
            pause = min(2 * pause, LONGEST)

    def _check_lives(self, what: str, messages: Sequence[Message]) -> None:
        for rank, segment in enumerate(self._segments):
            if rank != self._group.rank() and not segment.has_owner:
                mine = [one for one in messages if one.peer == rank]
                gone = mine[0] if mine else Message(Kind.FROM, GroupRank(rank), 0, None)
                raise TransportError(lost(what, self._group, gone))


def made_together(gloo: GlooTransport) -> Lane | None:
    """A lane between all ranks of a group; None where they cannot share memory. Collective.

    Raises:
        TransportError: a rank did not come.
    """
    slots = max(SLOTS, gloo.size - 1)
    chunk = max(SMALLEST_CHUNK, min(RING // slots, LARGEST_CHUNK)) // ALIGNMENT * ALIGNMENT
    shape = Shape(gloo.size, slots, chunk)
    own, name = None, 0
    with suppress(OSError):
        name = new_name()
        own = Segment(name, shape.nbytes, owner=True)
    names = _told(gloo, name if own else 0)
    segments: list[Segment] = []
    if own is not None and all(names):
        with suppress(OSError):
            segments = [
                own if one == name else Segment(one, shape.nbytes, owner=False) for one in names
            ]
    found = _told(gloo, len(segments))
    if own is not None:
        own.unlink()
    return Lane(gloo.group, shape, segments) if min(found) == gloo.size else None


def _told(gloo: GlooTransport, number: int) -> list[int]:
    """A number of each rank."""
    numbers = torch.zeros(gloo.size, dtype=torch.int64)
    numbers[gloo.rank] = number
    gloo.all_gather(numbers, [(rank, rank + 1) for rank in range(gloo.size)]).wait()
    return numbers.tolist()
