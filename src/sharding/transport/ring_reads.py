"""Reads of one operation from the rings of other ranks: terms of a sum, or parts of a gather."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from sharding.transport.ordered_sum import add_in_rank_order, divide_into
from sharding.transport.ring import RingReader

Readers = Mapping[int, RingReader]
"""Readers of the other ranks' rings, by group rank."""

Lane = tuple[Sequence[int], Sequence[Tensor], Callable[[Tensor, Sequence[Tensor]], object]]
"""Ranks whose chunks are read together, a target for each of their chunks in turn, and a function
of a target and the chunks."""


def add_chunks(rank: int, divisor: int, target: Tensor, chunks: Sequence[Tensor]) -> None:
    """Add the chunks of all other ranks to this rank's own term, which becomes the sum."""
    nbytes = target.numel() * target.element_size()
    divide_into(target, divisor, target)
    terms = [chunk[:nbytes].view(target.dtype) for chunk in chunks]
    add_in_rank_order(target, rank, terms)


def copy_chunk(target: Tensor, chunks: Sequence[Tensor]) -> None:
    """Copy the chunk of one rank."""
    target.copy_(chunks[0][: target.numel()])


class RingReads:
    """Reads of one operation, made as chunks arrive.

    Args:
        readers: of the rings.
        lanes: of the operation. They do not wait for one another.
        last: the number of the last part that this rank sends.
    """

    def __init__(self, readers: Readers, lanes: Sequence[Lane], last: int) -> None:
        self.last = last
        self._readers = readers
        self._lanes = lanes
        self._left = [deque(targets) for _, targets, _ in lanes]

    def read(self) -> bool:
        """Read the chunks that have arrived. Return True if there were any."""
        moved = False
        for (ranks, _, write), left in zip(self._lanes, self._left, strict=True):
            chunks: list[Tensor] = []
            for rank in ranks if left else ():
                chunk = self._readers[rank].peek()
                if chunk is None:
                    break
                chunks.append(chunk)
            if left and len(chunks) == len(ranks):
                write(left.popleft(), chunks)
                for rank in ranks:
                    self._readers[rank].advance()
                moved = True
        return moved

    def is_done(self) -> bool:
        """Return True if all chunks are read."""
        return not any(self._left)

    def missing_ranks(self) -> set[int]:
        """Return the ranks whose next chunk has not arrived."""
        every = zip(self._lanes, self._left, strict=True)
        waiting = {rank for (ranks, *_), left in every if left for rank in ranks}
        return {rank for rank in waiting if self._readers[rank].peek() is None}
