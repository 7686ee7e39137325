"""Channel of a rank to all other ranks: its ring, a queue of chunks to send, and the other rings.

A rank fills its ring when it launches an operation, as far as there is room, and again whenever it
waits. So a waiting rank never holds back chunks that another rank waits for.
"""

import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor

from sharding.transport import segment
from sharding.transport.atomics import unsupported_reason
from sharding.transport.groups import timeout_of
from sharding.transport.messages import (
    CPU,
    Direction,
    PartMessage,
    format_absent,
    format_lost,
    launch_broadcast,
    wait_messages,
)
from sharding.transport.ordered_sum import divide_into
from sharding.transport.protocol import TransportError
from sharding.transport.ring import RingReader, RingShape, RingWriter
from sharding.transport.ring_reads import RingReads
from sharding.transport.segment import NOWHERE, Address, SharedSegment

SHORTEST, LONGEST = 5e-5, 1e-3
"""The shortest and the longest pause between two polls of the rings, in seconds."""
LIVES = 0.25
"""Seconds between two checks that the other ranks are alive."""

SWITCH = "FUNCTIONAL_OPTIM_SHARED_MEMORY"
"""Environment variable. If it is 0 on any rank, all ranks use the network."""
MOST = 512
"""The largest number of ranks of a group that share memory."""
RING = 8 << 20
"""Bytes of a rank's ring, small enough for the processor's cache."""
SMALLEST_CHUNK, LARGEST_CHUNK = 1 << 16, 1 << 20
ALIGNMENT = 64


class RingChannel:
    """This rank's ring, and the rings of all other ranks."""

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
        """Readers of the other ranks' rings, by group rank, in order."""
        self._group = group
        self._own = segments[rank]  # kept, because its lock shows others that this rank is alive
        self._others = {peer: one for peer, one in enumerate(segments) if peer != rank}
        self._writer = RingWriter(segments[rank].memory, shape)
        self._queue: deque[tuple[Tensor, Sequence[int], int]] = deque()
        """Parts to send, each with its readers and divisor."""
        self._lock = threading.Lock()
        self._queued = 0
        self._sent = 0

    def send(self, parts: Iterable[tuple[Tensor, Sequence[int]]], divisor: int) -> int:
        """Queue parts of at most one chunk, each for some ranks. They are divided when sent.

        Returns:
            The number of the last part.
        """
        with self._lock:
            before = len(self._queue)
            self._queue.extend((part, ranks, divisor) for part, ranks in parts)
            self._queued += len(self._queue) - before
            return self._queued

    def push(self) -> bool:
        """Send queued parts while there is room. Return True if any was sent."""
        if not self._queue or not self._lock.acquire(blocking=False):
            return False
        try:
            before = self._sent
            while self._queue:
                slot = self._writer.find_free_slot()
                if slot is None:
                    break
                part, ranks, divisor = self._queue[0]
                room = self._writer.chunks[slot][: part.numel() * part.element_size()]
                divide_into(part, divisor, room.view(part.dtype))
                self._writer.publish(slot, ranks)
                self._queue.popleft()
                self._sent += 1
            return self._sent > before
        finally:
            self._lock.release()

    def finish(self, operation: str, reads: RingReads, messages: Sequence[PartMessage]) -> None:
        """Send and read until an operation is done."""
        pause, moved = SHORTEST, time.monotonic()
        timeout, checked = timeout_of(self._group, CPU).total_seconds(), moved
        while True:
            # Not `or`: another rank may wait for the chunks that this rank sends.
            if self.push() | reads.read():
                pause, moved = SHORTEST, time.monotonic()
                continue
            if self._sent >= reads.last and reads.is_done():
                return
            now = time.monotonic()
            if now - checked > LIVES:
                checked = now
                self._check_peers_alive(operation, reads, messages)
            if now - moved > timeout:
                raise TransportError(
                    format_absent(
                        operation, self._group, self._missing(reads, messages), now - moved
                    )
                )
            time.sleep(pause)
            pause = min(2 * pause, LONGEST)

    def _missing(self, reads: RingReads, messages: Sequence[PartMessage]) -> list[PartMessage]:
        """Return the messages that this rank waits for, in both directions."""
        late = {Direction.FROM: reads.missing_ranks(), Direction.TO: set[int]()}
        if self._sent < reads.last:
            late[Direction.TO] = self._writer.slow_readers()
        return [one for one in messages if one.peer in late[one.direction]]

    def _check_peers_alive(
        self, operation: str, reads: RingReads, messages: Sequence[PartMessage]
    ) -> None:
        # The locks are checked first: a rank can end after its part, and its chunks stay readable.
        dead = {rank for rank, one in self._others.items() if not one.has_owner}
        lost = [one for one in self._missing(reads, messages) if one.peer in dead]
        if lost:
            raise TransportError(format_lost(operation, self._group, lost[0]))


def create_channel(group: dist.ProcessGroup) -> RingChannel | None:
    """Return a channel between all ranks of a group, or None if they cannot share memory.

    Collective: all ranks must call this function.

    Raises:
        TransportError: a rank did not come.
    """
    size = group.size()
    if size > MOST:
        return None
    slots = max(RING // LARGEST_CHUNK, size - 1)
    chunk = max(SMALLEST_CHUNK, RING // slots) // ALIGNMENT * ALIGNMENT
    shape = RingShape(size, slots, chunk)
    own = _create_segment(shape.nbytes)
    addresses = [Address(*one) for one in _gather_numbers(group, own.address if own else NOWHERE)]
    segments: list[SharedSegment] = []
    if own is not None and NOWHERE not in addresses:
        with suppress(OSError):
            segments = [
                own if one == own.address else SharedSegment.attach(one, shape.nbytes)
                for one in addresses
            ]
    counts = _gather_numbers(group, [len(segments)])
    return RingChannel(group, shape, segments) if min(counts) == [size] else None


def _create_segment(nbytes: int) -> SharedSegment | None:
    """Return this rank's segment, or None if it has none. Warn if this is not by choice."""
    if os.environ.get(SWITCH) == "0" or not (segment.PROCESSES / "self" / "fd").is_dir():
        return None
    why = unsupported_reason()
    if not why:
        try:
            return SharedSegment.create(nbytes)
        except OSError as error:
            why = str(error)
    warnings.warn(
        f"{why}; ranks will exchange through the network instead, which takes about twice as long: "
        f"set {SWITCH}=0 where this is as it should be",
        RuntimeWarning,
        stacklevel=2,
    )
    return None


def _gather_numbers(group: dist.ProcessGroup, numbers: Sequence[int]) -> list[list[int]]:
    """Return the numbers of every rank. Collective: all ranks pass equally many numbers."""
    operation, rank = "finding out whether memory can be shared", group.rank()
    words = [torch.tensor(numbers, device="cpu") for _ in range(group.size())]
    wait_messages(
        operation, group, [launch_broadcast(operation, group, *one, 1) for one in enumerate(words)]
    )
    assert words[rank].tolist() == list(numbers)
    return [word.tolist() for word in words]
