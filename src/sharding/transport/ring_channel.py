"""Operations of one kind over rings: what is to be sent, in order, and waiting for the others.

Nobody sends by itself: a rank fills its ring when an operation is launched, as far as there is
room, and goes on with it whenever it waits. So a rank that waits for another never keeps what that
one waits for.
"""

import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from sharding.transport import segment
from sharding.transport.messages import (
    CPU,
    Direction,
    PartMessage,
    absent,
    broadcast,
    lost,
    receive,
)
from sharding.transport.ordered import why_not
from sharding.transport.ordered_sum import divided
from sharding.transport.peers import timeout_of
from sharding.transport.protocol import TransportError
from sharding.transport.ring import RingReader, RingShape, RingWriter
from sharding.transport.segment import NOWHERE, Address, SharedSegment
from sharding.transport.taking import Taking

SHORTEST, LONGEST = 5e-5, 1e-3
"""Seconds between two looks at what others have done, at first and at most."""
LIVES = 0.25
"""Seconds between two looks at whether the others live."""


SWITCH = "FUNCTIONAL_OPTIM_SHARED_MEMORY"
"""The environment variable: where it is 0, on any rank, all go through the network."""
MOST = 512
"""Ranks: no host runs more of one group."""
RING = 8 << 20
"""Bytes of a rank's ring: so few that it stays in the processor's cache."""
SMALLEST_CHUNK, LARGEST_CHUNK = 1 << 16, 1 << 20
ALIGNMENT = 64


class _Sending(NamedTuple):
    """A chunk to be sent."""

    part: Tensor
    readers: Sequence[int]
    divisor: int


class RingChannel:
    """This rank's ring, and those of all others.

    Args:
        group: whose ranks.
        shape: of the rings.
        segments: of all ranks, this one's among them.
    """

    def __init__(
        self, group: dist.ProcessGroup, shape: RingShape, segments: Sequence[SharedSegment]
    ) -> None:
        rank = group.rank()
        self.chunk = shape.chunk
        self.readers = {
            peer: RingReader(one.memory, shape, rank)
            for peer, one in enumerate(segments)
            if peer != rank
        }
        """Of what the others send, by their ranks in the group, in order."""
        self._group = group
        self._own = segments[rank]  # by which the others see that this rank lives
        self._others = {peer: one for peer, one in enumerate(segments) if peer != rank}
        self._writer = RingWriter(segments[rank].memory, shape)
        self._queue: deque[_Sending] = deque()
        self._lock = threading.Lock()
        self._queued = 0
        self._sent = 0

    def send(self, parts: Iterable[tuple[Tensor, Sequence[int]]], divisor: int) -> int:
        """Send parts of at most one chunk to ranks, once there is room; divided on the way.

        Returns:
            The number of the last.
        """
        with self._lock:
            before = len(self._queue)
            self._queue.extend(_Sending(part, ranks, divisor) for part, ranks in parts)
            self._queued += len(self._queue) - before
            return self._queued

    def push(self) -> bool:
        """Send what there is room for; whether that was anything."""
        if not self._queue or not self._lock.acquire(blocking=False):
            return False
        try:
            before = self._sent
            while self._queue:
                slot = self._writer.free()
                if slot is None:
                    break
                part, ranks, divisor = self._queue[0]
                room = self._writer.chunks[slot][: part.numel() * part.element_size()]
                divided(part, divisor, room.view(part.dtype))
                self._writer.publish(slot, ranks)
                self._queue.popleft()
                self._sent += 1
            return self._sent > before
        finally:
            self._lock.release()

    def finish(self, what: str, taking: Taking, messages: Sequence[PartMessage]) -> None:
        """Send and take until an operation is done.

        Args:
            what: the operation, for errors.
            taking: what it takes.
            messages: all of the operation, for errors.

        Raises:
            TransportError: names the ranks that died or did not do their part in time.
        """
        pause, moved = SHORTEST, time.monotonic()
        timeout, looked = timeout_of(self._group, CPU).total_seconds(), moved
        while True:
            # Both, each time: another may wait for what this rank sends.
            if self.push() | taking.take():
                pause, moved = SHORTEST, time.monotonic()
                continue
            if self._sent >= taking.last and taking.is_done():
                return
            now = time.monotonic()
            if now - looked > LIVES:
                looked = now
                self._check_lives(what, taking, messages)
            if now - moved > timeout:
                raise TransportError(
                    absent(what, self._group, self._missing(taking, messages), now - moved)
                )
            time.sleep(pause)
            pause = min(2 * pause, LONGEST)

    def _missing(self, taking: Taking, messages: Sequence[PartMessage]) -> list[PartMessage]:
        """Return a text of the missing ranks, and of the data that was not read."""
        late = {Direction.FROM: taking.waits_for(), Direction.TO: set[int]()}
        if self._sent < taking.last:
            late[Direction.TO] = self._writer.slow()
        return [one for one in messages if one.peer in late[one.direction]]

    def _check_lives(self, what: str, taking: Taking, messages: Sequence[PartMessage]) -> None:
        # In this order: a rank that did its part may end, and what it has sent is still there.
        dead = {rank for rank, one in self._others.items() if not one.has_owner}
        lost_ones = [one for one in self._missing(taking, messages) if one.peer in dead]
        if lost_ones:
            raise TransportError(lost(what, self._group, lost_ones[0]))


def made_together(group: dist.ProcessGroup) -> RingChannel | None:
    """A channel between all ranks of a group; None where they cannot share memory. Collective.

    Raises:
        TransportError: a rank did not come.
    """
    size = group.size()
    if size > MOST:
        return None
    slots = max(RING // LARGEST_CHUNK, size - 1)
    chunk = max(SMALLEST_CHUNK, RING // slots) // ALIGNMENT * ALIGNMENT
    shape = RingShape(size, slots, chunk)
    own = _own(shape.nbytes)
    addresses = [Address(*one) for one in _told(group, own.address if own else NOWHERE)]
    segments: list[SharedSegment] = []
    if own is not None and NOWHERE not in addresses:
        with suppress(OSError):
            segments = [
                own if one == own.address else SharedSegment.find(one, shape.nbytes)
                for one in addresses
            ]
    found = _told(group, [len(segments)])
    return RingChannel(group, shape, segments) if min(found) == [size] else None


def _own(nbytes: int) -> SharedSegment | None:
    """This rank's memory, if it can have some; it says so where it is not by choice."""
    if os.environ.get(SWITCH) == "0" or not (segment.PROCESSES / "self" / "fd").is_dir():
        return None
    why = why_not()
    if not why:
        try:
            return SharedSegment.make(nbytes)
        except OSError as error:
            why = str(error)
    warnings.warn(
        f"{why}; ranks will exchange through the network instead, which takes about twice as long: "
        f"set {SWITCH}=0 where this is as it should be",
        RuntimeWarning,
        stacklevel=2,
    )
    return None


def _told(group: dist.ProcessGroup, numbers: Sequence[int]) -> list[list[int]]:
    """Read as many numbers of each rank."""
    what, rank = "finding out whether memory can be shared", group.rank()
    words = [torch.tensor(numbers, device="cpu") for _ in range(group.size())]
    receive(what, group, [broadcast(what, group, *one, 1) for one in enumerate(words)])
    assert words[rank].tolist() == list(numbers)
    return [word.tolist() for word in words]
