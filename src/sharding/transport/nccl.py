"""Transport over NCCL, with NCCL's own reduce-scatter and all-gather.

Sums are not in rank order: NCCL chooses the order, so the last bits depend on sizes and topology.

An operation keeps all of its memory until a stream waits, and records that memory on the waiting
stream. Lists of tensors of one size are never passed to torch: torch copies such a list to a flat
tensor, and frees this tensor as soon as any stream waits. The launching stream, which has not
waited, could then reuse the memory while NCCL still uses it. So such tensors are concatenated here.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from sharding.transport.buffers import as_bytes, as_real, check_buffer, divide
from sharding.transport.groups import GroupRank, format_ranks
from sharding.transport.messages import ADVICE
from sharding.transport.protocol import Range, TransportError, Work
from sharding.transport.work import StreamEvent


class NcclWork:
    """Handle of a collective in NCCL's stream.

    ``staging`` is further memory of the collective. ``finish`` copies from there to the buffer; it
    is called once, in the stream of the first waiter.
    """

    def __init__(
        self,
        operation: str,
        group: dist.ProcessGroup,
        flat: Tensor,
        work: dist.Work,
        staging: Tensor | None = None,
        finish: Callable[[], object] | None = None,
    ) -> None:
        self._what = operation
        self._group = group
        self._flat = flat
        self._work = work
        self._staging = staging
        self._finish = finish
        self._finished: StreamEvent | None = None
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Let the current stream wait. The host does not wait."""
        try:
            self._work.wait()
        except RuntimeError as error:
            own = GroupRank(self._group.rank())
            others = [GroupRank(rank) for rank in range(self._group.size()) if rank != own]
            raise TransportError(
                f"{self._what}: {format_ranks(self._group, [own])} waited for "
                f"{format_ranks(self._group, others)}, one of which died or did not come. {ADVICE}"
            ) from error
        with self._lock:
            self._record(self._flat)
            if self._finished is not None:
                self._finished.wait()
            elif self._finish is not None:
                self._finish()
                self._record(self._staging)
                self._finish = self._staging = None
                self._finished = StreamEvent(self._flat.device)

    @staticmethod
    def _record(memory: Tensor | None) -> None:
        """Keep the allocator from reusing memory before the current stream reaches this point."""
        if memory is not None and memory.is_cuda:
            memory.record_stream(torch.cuda.current_stream(memory.device))


class NcclTransport:
    """Transport with NCCL's collectives, in place; see :class:`~sharding.transport.Transport`.

    Ranges of equal size need one collective. If they are adjacent and in rank order, nothing is
    copied; otherwise they are copied to adjacent memory. For ranges of several sizes, NCCL runs one
    reduce or broadcast for each rank, as one group. ``bytes_sent`` counts the bytes of a ring
    algorithm.

    Args:
        group: the process group; its backend for CUDA tensors must be nccl.
    """

    rank_ordered = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.bytes_sent = 0

    def reduce_scatter(
        self, flat: Tensor, ranges: Sequence[Range], *, average: bool = False
    ) -> Work:
        """Sum buffers: see :meth:`sharding.transport.Transport.reduce_scatter`."""
        check_buffer(flat, ranges, self.size)
        real, cuts = as_real(flat, ranges)
        if self.size == 1:
            return StreamEvent(flat.device)
        if average:
            divide(flat, ranges)
        parts = [real[start:stop] for start, stop in cuts]
        own = parts[self.rank]
        self.bytes_sent += _other_bytes(parts, self.rank)
        if not _have_one_size(cuts):
            work = dist.reduce_scatter(own, parts, group=self.group, async_op=True)
            return NcclWork("reduce_scatter", self.group, flat, work)
        adjacent = _are_adjacent(cuts)
        whole = real[cuts[0][0] : cuts[-1][1]] if adjacent else torch.cat(parts)
        piece = self._own_piece(whole)
        work = dist.reduce_scatter_single(piece, whole, group=self.group, async_op=True)
        finish = None if adjacent else partial(own.copy_, piece)
        return NcclWork("reduce_scatter", self.group, flat, work, whole, finish)

    def all_gather(self, flat: Tensor, ranges: Sequence[Range]) -> Work:
        """Gather ranges: see :meth:`sharding.transport.Transport.all_gather`."""
        check_buffer(flat, ranges, self.size)
        if self.size == 1:
            return StreamEvent(flat.device)
        raw, cuts = as_bytes(flat, ranges)
        parts = [raw[start:stop] for start, stop in cuts]
        own = parts[self.rank]
        self.bytes_sent += _other_bytes(parts, (self.rank + 1) % self.size)
        if not _have_one_size(cuts):
            work = dist.all_gather(parts, own, group=self.group, async_op=True)
            return NcclWork("all_gather", self.group, flat, work)
        adjacent = _are_adjacent(cuts)
        whole = raw[cuts[0][0] : cuts[-1][1]] if adjacent else raw.new_empty(self.size * len(own))
        piece = self._own_piece(whole)
        if not adjacent:
            piece.copy_(own)
        work = dist.all_gather_single(whole, piece, group=self.group, async_op=True)
        finish = None if adjacent else partial(_copy_others, parts, whole, self.rank)
        return NcclWork("all_gather", self.group, flat, work, whole, finish)

    def _own_piece(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor with the parts of all ranks."""
        length = len(whole) // self.size
        return whole[self.rank * length : (self.rank + 1) * length]


def _copy_others(parts: Sequence[Tensor], whole: Tensor, rank: int) -> None:
    """Copy the parts of other ranks from staging memory to the buffer."""
    gathered = whole.view(len(parts), len(parts[rank]))
    for other, (part, one) in enumerate(zip(parts, gathered, strict=True)):
        if other != rank:
            part.copy_(one)


def _have_one_size(cuts: Sequence[Range]) -> bool:
    return len({stop - start for start, stop in cuts}) == 1


def _are_adjacent(cuts: Sequence[Range]) -> bool:
    """Return True if each range begins at the end of the previous range, in rank order."""
    return all(one[1] == other[0] for one, other in pairwise(cuts))


def _other_bytes(parts: Sequence[Tensor], rank: int) -> int:
    """Return the bytes of all parts except one: in a ring, a rank sends all parts but one."""
    return sum(part.numel() * part.element_size() for at, part in enumerate(parts) if at != rank)
