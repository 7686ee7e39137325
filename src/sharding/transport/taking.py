"""Reads from the rings of other ranks: the terms of a sum, or the parts of a gather."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from sharding.transport.ordered_sum import add_in_rank_order, divided
from sharding.transport.ring import RingReader

Readers = Mapping[int, RingReader]
"""By the ranks in the group."""


class Taking(Protocol):
    """An operation that takes what others send, as it comes."""

    last: int
    """The number of the last part that it sends."""

    def take(self) -> bool:
        """Take what has come; whether that was anything."""

    def is_done(self) -> bool:
        """Return True if all has been taken."""

    def waits_for(self) -> set[int]:
        """The ranks of which something is yet to come, and has not."""


class Sum:
    """Takes chunks of a sum: each when it has come from all other ranks.

    Args:
        readers: of what the other ranks send.
        parts: this rank's own, in chunks.
        rank: this one.
        divisor: of every term.
        last: the number of the last part that this rank sends.
    """

    def __init__(
        self, readers: Readers, parts: Sequence[Tensor], rank: int, divisor: int, last: int
    ) -> None:
        self.last = last
        self._readers = readers
        self._blocks = deque(parts)
        self._rank = rank
        self._divisor = divisor

    def take(self) -> bool:
        """Add one chunk of each rank."""
        if not self._blocks:
            return False
        heads = [reader.next() for reader in self._readers.values()]
        block = self._blocks[0]
        nbytes = block.numel() * block.element_size()
        terms = [chunk[:nbytes].view(block.dtype) for chunk in heads if chunk is not None]
        if len(terms) < len(heads):
            return False
        divided(block, self._divisor, block)
        add_in_rank_order(block, self._rank, terms)
        for reader in self._readers.values():
            reader.take()
        self._blocks.popleft()
        return True

    def is_done(self) -> bool:
        """Return True if all blocks are added."""
        return not self._blocks

    def waits_for(self) -> set[int]:
        """The ranks whose next chunk is not there."""
        if not self._blocks:
            return set()
        return {rank for rank, reader in self._readers.items() if reader.next() is None}


class Copies:
    """Takes chunks of a gather: each as it comes.

    Args:
        readers: of what the other ranks send.
        parts: where it belongs, in chunks, for each of them.
        last: the number of the last part that this rank sends.
    """

    def __init__(self, readers: Readers, parts: Mapping[int, Sequence[Tensor]], last: int) -> None:
        self.last = last
        self._readers = readers
        self._left = {rank: deque(targets) for rank, targets in parts.items()}

    def take(self) -> bool:
        """Copy one chunk of each rank, where there is one."""
        moved = False
        for rank, targets in self._left.items():
            chunk = self._readers[rank].next() if targets else None
            if chunk is not None:
                target = targets.popleft()
                target.copy_(chunk[: target.numel()])
                self._readers[rank].take()
                moved = True
        return moved

    def is_done(self) -> bool:
        """Return True if all parts are copied."""
        return not any(self._left.values())

    def waits_for(self) -> set[int]:
        """The ranks of which a chunk is yet to come, and is not there."""
        return {
            rank
            for rank, targets in self._left.items()
            if targets and self._readers[rank].next() is None
        }
