"""Reads of one operation from the rings of other ranks: terms of a sum, or parts of a gather."""

from collections import deque
from collections.abc import Mapping, Sequence

from torch import Tensor

from sharding.transport.ordered_sum import add_in_rank_order, divide_into
from sharding.transport.ring import RingReader

Readers = Mapping[int, RingReader]
"""Readers of the other ranks' rings, by group rank."""


class RingSum:
    """Adds chunks of all ranks, each once it has arrived from all other ranks.

    ``parts`` are this rank's own terms, in chunks, which become the sums. ``last`` is the number of
    the last part that this rank sends.
    """

    def __init__(
        self, readers: Readers, parts: Sequence[Tensor], rank: int, divisor: int, last: int
    ) -> None:
        self.last = last
        self._readers = readers
        self._blocks = deque(parts)
        self._rank = rank
        self._divisor = divisor

    def read(self) -> bool:
        """Read the chunks that have arrived. Return True if there were any."""
        if not self._blocks:
            return False
        heads = [reader.peek() for reader in self._readers.values()]
        block = self._blocks[0]
        nbytes = block.numel() * block.element_size()
        terms = [chunk[:nbytes].view(block.dtype) for chunk in heads if chunk is not None]
        if len(terms) < len(heads):
            return False
        divide_into(block, self._divisor, block)
        add_in_rank_order(block, self._rank, terms)
        for reader in self._readers.values():
            reader.advance()
        self._blocks.popleft()
        return True

    def is_done(self) -> bool:
        """Return True if all chunks are read."""
        return not self._blocks

    def missing_ranks(self) -> set[int]:
        """Return the ranks whose next chunk has not arrived."""
        if not self._blocks:
            return set()
        return {rank for rank, reader in self._readers.items() if reader.peek() is None}


class RingCopies:
    """Copies chunks of a gather, each as it arrives, to ``parts`` of the other ranks.

    The methods are those of :class:`RingSum`.
    """

    def __init__(self, readers: Readers, parts: Mapping[int, Sequence[Tensor]], last: int) -> None:
        self.last = last
        self._readers = readers
        self._left = {rank: deque(targets) for rank, targets in parts.items()}

    def read(self) -> bool:
        moved = False
        for rank, targets in self._left.items():
            chunk = self._readers[rank].peek() if targets else None
            if chunk is not None:
                target = targets.popleft()
                target.copy_(chunk[: target.numel()])
                self._readers[rank].advance()
                moved = True
        return moved

    def is_done(self) -> bool:
        return not any(self._left.values())

    def missing_ranks(self) -> set[int]:
        return {
            rank
            for rank, targets in self._left.items()
            if targets and self._readers[rank].peek() is None
        }


RingReads = RingSum | RingCopies
"""Reads of one operation, made as chunks arrive."""
