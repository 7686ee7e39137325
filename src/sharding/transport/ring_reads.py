"""Reads of one operation from the rings of other ranks: terms of a sum, or parts of a gather."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import Tensor

from sharding.transport.ordered_sum import add_in_rank_order, divide_into
from sharding.transport.ring import RingReader

Readers = Mapping[int, RingReader]
"""Readers of the other ranks' rings, by group rank."""

Lane = tuple[Sequence[int], Sequence[Callable[[Sequence[Tensor]], object]]]
"""Ranks whose chunks are read together, and for each of their chunks a function of the chunks."""


def sum_lane(readers: Readers, parts: Sequence[Tensor], rank: int, divisor: int) -> Lane:
    """Return the lane of a sum: ``parts`` are this rank's own terms, which become the sums."""
    return list(readers), [partial(_add, part, rank, divisor) for part in parts]


def copy_lane(rank: int, parts: Sequence[Tensor]) -> Lane:
    """Return the lane of the chunks of one rank in a gather, which are copied to ``parts``."""
    return [rank], [partial(_copy, part) for part in parts]


def _add(block: Tensor, rank: int, divisor: int, chunks: Sequence[Tensor]) -> None:
    nbytes = block.numel() * block.element_size()
    divide_into(block, divisor, block)
    add_in_rank_order(block, rank, [chunk[:nbytes].view(block.dtype) for chunk in chunks])


def _copy(target: Tensor, chunks: Sequence[Tensor]) -> None:
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
        self._lanes = [(ranks, deque(calls)) for ranks, calls in lanes]

    def read(self) -> bool:
        """Read the chunks that have arrived. Return True if there were any."""
        moved = False
        for ranks, calls in self._lanes:
            heads = [self._readers[rank].peek() for rank in ranks] if calls else []
            chunks = [chunk for chunk in heads if chunk is not None]
            if calls and len(chunks) == len(ranks):
                calls.popleft()(chunks)
                for rank in ranks:
                    self._readers[rank].advance()
                moved = True
        return moved

    def is_done(self) -> bool:
        """Return True if all chunks are read."""
        return not any(calls for _, calls in self._lanes)

    def missing_ranks(self) -> set[int]:
        """Return the ranks whose next chunk has not arrived."""
        waiting = {rank for ranks, calls in self._lanes if calls for rank in ranks}
        return {rank for rank in waiting if self._readers[rank].peek() is None}
