"""Ring buffer in shared memory with one writer and several readers, without blocking.

The memory begins with a table of 64-bit integers: for each reader, the number of chunks published
for this reader, the number of chunks that it has read, and a queue of their slots. Each integer has
one writer. A slot is reused when all of its readers have read its chunk.
"""

import mmap
from collections.abc import Iterable

import torch
from torch import Tensor

from sharding.transport.atomics import AtomicTable

PUT, TAKEN, QUEUE = 0, 8, 16
"""Indices in a reader's part of the table: chunks published, chunks read, and the queue of slots.
The first two are in different cache lines, because different processes write them."""
LINE = 8
"""Integers per cache line."""
PAGE = 4096


class RingShape:
    """Layout of a shared segment: the table, and slots for chunks.

    Args:
        readers: number of ranks that can read.
        slots: number of chunks. A sum reads one chunk of each rank at a time, and needs at least as
            many slots as the other ranks. With fewer slots, ranks can deadlock in a cycle.
        chunk: bytes of a chunk.
    """

    def __init__(self, readers: int, slots: int, chunk: int) -> None:
        self.slots = slots
        self.chunk = chunk
        self.stride = QUEUE + -(-slots // LINE) * LINE
        self.numbers = readers * self.stride
        self.start = -(-8 * self.numbers // PAGE) * PAGE
        self.nbytes = self.start + slots * chunk

    def table(self, memory: mmap.mmap) -> AtomicTable:
        """Return the table at the beginning of a segment."""
        return AtomicTable(memory, self.numbers)

    def chunks(self, memory: mmap.mmap) -> list[Tensor]:
        """Return the memory of all slots, as bytes."""
        flat = torch.frombuffer(memory, dtype=torch.uint8)[self.start : self.nbytes]
        return list(flat.split(self.chunk))


class RingWriter:
    """Writer of a ring."""

    def __init__(self, memory: mmap.mmap, shape: RingShape) -> None:
        self._shape = shape
        self._table = shape.table(memory)
        self.chunks = shape.chunks(memory)
        self._pending: list[list[tuple[int, int]]] = [[] for _ in range(shape.slots)]
        """For each slot, its readers, and the count of each reader once it has read the slot."""

    def find_free_slot(self) -> int | None:
        """Return a slot that all of its readers have read, or None."""
        for slot, pending in enumerate(self._pending):
            if all(self._has_read(reader, count) for reader, count in pending):
                return slot
        return None

    def slow_readers(self) -> set[int]:
        """Return the readers that have not read all chunks published for them."""
        return {
            reader
            for pending in self._pending
            for reader, count in pending
            if not self._has_read(reader, count)
        }

    def _has_read(self, reader: int, count: int) -> bool:
        return self._table.acquire(reader * self._shape.stride + TAKEN) >= count

    def publish(self, slot: int, readers: Iterable[int]) -> None:
        """Publish a filled slot for readers."""
        pending = []
        for reader in readers:
            start = reader * self._shape.stride
            count = self._table[start + PUT]
            self._table[start + QUEUE + count % self._shape.slots] = slot
            pending.append((reader, count + 1))
        for reader, count in pending:
            self._table.release(reader * self._shape.stride + PUT, count)
        self._pending[slot] = pending


class RingReader:
    """Reader of another rank's ring."""

    def __init__(self, memory: mmap.mmap, shape: RingShape, reader: int) -> None:
        self._slots = shape.slots
        self._table = shape.table(memory)
        self._chunks = shape.chunks(memory)
        self._start = reader * shape.stride

    def peek(self) -> Tensor | None:
        """Return the oldest unread chunk, or None."""
        taken = self._table[self._start + TAKEN]
        if self._table.acquire(self._start + PUT) == taken:
            return None
        return self._chunks[self._table[self._start + QUEUE + taken % self._slots]]

    def advance(self) -> None:
        """Mark the oldest unread chunk as read."""
        self._table.release(self._start + TAKEN, self._table[self._start + TAKEN] + 1)
