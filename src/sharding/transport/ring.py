"""A ring of chunks in shared memory: one rank fills them, others take them, nobody waits here.

The memory begins with a table of 64-bit numbers: for each reader how many chunks were put there for
it, how many it has taken, and which slots they lie in. Each number has one writer. A slot is filled
again when all readers that it was for have taken it.
"""

import mmap
from collections.abc import Iterable

import torch
from torch import Tensor

from sharding.transport.ordered import SharedNumbers

PUT, TAKEN, QUEUE = 0, 8, 16
"""Where a reader's numbers stand in its part of the table; apart, so that no line of the cache is
written by two."""
LINE = 8
"""Numbers in a line of the cache."""
PAGE = 4096


class RingShape:
    """Division of a segment.

    Args:
        readers: how many ranks may read, whether they do or not.
        slots: chunks at once. Where a reader takes one of each other rank at a time, as sums do,
            as many as there are readers: with less, ranks may wait for one another in a ring.
        chunk: bytes of each.
    """

    def __init__(self, readers: int, slots: int, chunk: int) -> None:
        self.slots = slots
        self.chunk = chunk
        self.stride = QUEUE + -(-slots // LINE) * LINE
        self.numbers = readers * self.stride
        self.start = -(-8 * self.numbers // PAGE) * PAGE
        self.nbytes = self.start + slots * chunk

    def table(self, memory: mmap.mmap) -> SharedNumbers:
        """The numbers."""
        return SharedNumbers(memory, self.numbers)

    def chunks(self, memory: mmap.mmap) -> list[Tensor]:
        """The slots, in bytes."""
        flat = torch.frombuffer(memory, dtype=torch.uint8)[self.start : self.nbytes]
        return list(flat.split(self.chunk))


class RingWriter:
    """The side that fills chunks."""

    def __init__(self, memory: mmap.mmap, shape: RingShape) -> None:
        self._shape = shape
        self._table = shape.table(memory)
        self.chunks = shape.chunks(memory)
        self._given: list[list[tuple[int, int]]] = [[] for _ in range(shape.slots)]
        """For each slot, which readers it was for, and how many chunks each has taken then."""

    def free(self) -> int | None:
        """A slot that may be filled, if there is one."""
        for slot, given in enumerate(self._given):
            if all(self._has_taken(reader, count) for reader, count in given):
                return slot
        return None

    def slow(self) -> set[int]:
        """The readers that have not taken all that is there for them."""
        return {
            reader
            for given in self._given
            for reader, count in given
            if not self._has_taken(reader, count)
        }

    def _has_taken(self, reader: int, count: int) -> bool:
        return self._table.acquire(reader * self._shape.stride + TAKEN) >= count

    def publish(self, slot: int, readers: Iterable[int]) -> None:
        """Hand a filled slot to readers."""
        given = []
        for reader in readers:
            start = reader * self._shape.stride
            count = self._table[start + PUT]
            self._table[start + QUEUE + count % self._shape.slots] = slot
            given.append((reader, count + 1))
        for reader, count in given:
            self._table.release(reader * self._shape.stride + PUT, count)
        self._given[slot] = given


class RingReader:
    """The side that takes them.

    Args:
        memory: of another rank.
        shape: as that rank divides it.
        reader: this rank's number.
    """

    def __init__(self, memory: mmap.mmap, shape: RingShape, reader: int) -> None:
        self._slots = shape.slots
        self._table = shape.table(memory)
        self._chunks = shape.chunks(memory)
        self._start = reader * shape.stride

    def next(self) -> Tensor | None:
        """The oldest chunk that was not taken yet, if there is one."""
        taken = self._table[self._start + TAKEN]
        if self._table.acquire(self._start + PUT) == taken:
            return None
        return self._chunks[self._table[self._start + QUEUE + taken % self._slots]]

    def take(self) -> None:
        """Done with the oldest chunk."""
        self._table.release(self._start + TAKEN, self._table[self._start + TAKEN] + 1)
