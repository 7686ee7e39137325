"""The transport over NCCL: its own reduce-scatter and all-gather, which are the right ones there.

Not in rank order: NCCL chooses how it adds, so the last bits depend on sizes and topology.

All memory that a collective uses is held here until somebody waits for it, and recorded on the
stream that waits. torch's collectives over lists of tensors of one size make a flat copy of their
own, which is free again as soon as any stream waits; the stream that launched them, which has not
waited, then gets that memory for its next tensor while NCCL still uses it. So such tensors are laid
side by side here, and torch is never given a list of them.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from sharding.transport.buffers import as_bytes, as_real, check_buffer, divide
from sharding.transport.peers import GroupRank, named
from sharding.transport.protocol import Range, TransportError, Work
from sharding.transport.works import Done, Queued


class NcclWork:
    """A collective in a stream of NCCL's.

    Args:
        what: is done, for errors.
        group: whose ranks do it.
        flat: the buffer of the caller.
        work: as torch gave it.
        staging: further memory that it uses.
        finish: copies from there to the buffer; called once, in the stream of the first waiter.
    """

    def __init__(
        self,
        what: str,
        group: dist.ProcessGroup,
        flat: Tensor,
        work: dist.Work,
        staging: Tensor | None = None,
        finish: Callable[[], object] | None = None,
    ) -> None:
        self._what = what
        self._group = group
        self._flat = flat
        self._work = work
        self._staging = staging
        self._finish = finish
        self._finished: Queued | None = None
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Have the current stream wait; the host goes on."""
        try:
            self._work.wait()
        except RuntimeError as error:
            others = [GroupRank(q) for q in range(self._group.size()) if q != self._group.rank()]
            raise TransportError(
                f"{self._what}: {named(self._group, [GroupRank(self._group.rank())])} waited for "
                f"{named(self._group, others)}, one of which died or did not come. Ranks may "
                "differ now: end them all, and go on from the last checkpoint"
            ) from error
        with self._lock:
            self._record(self._flat)
            if self._finished is not None:
                self._finished.wait()
            elif self._finish is not None:
                self._finish()
                self._record(self._staging)
                self._finish = self._staging = None
                self._finished = Queued(self._flat.device)

    @staticmethod
    def _record(memory: Tensor | None) -> None:
        """Keep memory from being used again before the current stream has come to this point.

        Who lets go of it may do so earlier, and it need not be of the current stream.
        """
        if memory is not None and memory.is_cuda:
            memory.record_stream(torch.cuda.current_stream(memory.device))


class NcclTransport:
    """NCCL's own collectives, in place; see :class:`~sharding.transport.Transport`.

    Ranges of one size take one collective: without any copy where they lie side by side in rank
    order, else over a copy in which they do. Ranges of several sizes take a reduce or a broadcast
    for each rank, which NCCL runs as one group. Nothing is added on the host. ``bytes_sent`` counts
    what a ring sends.

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
        """Sum: see :meth:`sharding.transport.Transport.reduce_scatter`."""
        check_buffer(flat, ranges, self.size)
        real, cuts = as_real(flat, ranges)
        if self.size == 1:
            return Done(flat)
        if average:
            divide(flat, ranges)
        parts = [real[start:stop] for start, stop in cuts]
        own = parts[self.rank]
        self.bytes_sent += _other_bytes(parts, self.rank)
        if not _of_one_size(cuts):
            work = dist.reduce_scatter(own, parts, group=self.group, async_op=True)
            return NcclWork("reduce_scatter", self.group, flat, work)
        adjacent = _are_adjacent(cuts)
        whole = real[cuts[0][0] : cuts[-1][1]] if adjacent else torch.cat(parts)
        piece = self._own_piece(whole)
        work = dist.reduce_scatter_single(piece, whole, group=self.group, async_op=True)
        if adjacent:
            return NcclWork("reduce_scatter", self.group, flat, work)
        finish = partial(own.copy_, piece)
        return NcclWork("reduce_scatter", self.group, flat, work, whole, finish)

    def all_gather(self, flat: Tensor, ranges: Sequence[Range]) -> Work:
        """Hand ranges to all: see :meth:`sharding.transport.Transport.all_gather`."""
        check_buffer(flat, ranges, self.size)
        if self.size == 1:
            return Done(flat)
        raw, cuts = as_bytes(flat, ranges)
        parts = [raw[start:stop] for start, stop in cuts]
        own = parts[self.rank]
        self.bytes_sent += _other_bytes(parts, (self.rank + 1) % self.size)
        if not _of_one_size(cuts):
            work = dist.all_gather(parts, own, group=self.group, async_op=True)
            return NcclWork("all_gather", self.group, flat, work)
        adjacent = _are_adjacent(cuts)
        whole = raw[cuts[0][0] : cuts[-1][1]] if adjacent else raw.new_empty(self.size * len(own))
        piece = self._own_piece(whole)
        if not adjacent:
            piece.copy_(own)
        work = dist.all_gather_single(whole, piece, group=self.group, async_op=True)
        if adjacent:
            return NcclWork("all_gather", self.group, flat, work)
        came = whole.split(len(own)) if len(own) else []
        finish = partial(_copy_others, parts, came, self.rank)
        return NcclWork("all_gather", self.group, flat, work, whole, finish)

    def _own_piece(self, whole: Tensor) -> Tensor:
        """This rank's part of a tensor in which all ranks' parts lie side by side."""
        length = len(whole) // self.size
        return whole[self.rank * length : (self.rank + 1) * length]


def _copy_others(parts: Sequence[Tensor], came: Sequence[Tensor], rank: int) -> None:
    """Copy what came from other ranks to its places."""
    for other, (part, one) in enumerate(zip(parts, came, strict=False)):
        if other != rank:
            part.copy_(one)


def _of_one_size(cuts: Sequence[Range]) -> bool:
    return len({stop - start for start, stop in cuts}) == 1


def _are_adjacent(cuts: Sequence[Range]) -> bool:
    """Return True if ranges lie side by side, in the order of ranks."""
    return all(one[1] == other[0] for one, other in pairwise(cuts))


def _other_bytes(parts: Sequence[Tensor], rank: int) -> int:
    """In a ring, every part passes through every rank but one."""
    return sum(part.numel() * part.element_size() for at, part in enumerate(parts) if at != rank)
