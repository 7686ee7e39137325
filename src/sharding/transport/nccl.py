"""The transport over NCCL: its own reduce-scatter and all-gather, which are the right ones there.

Not in rank order: NCCL chooses how it adds, so the last bits depend on sizes and topology.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from sharding.transport.buffers import as_bytes, as_real, check_buffer, divide
from sharding.transport.peers import GroupRank, named
from sharding.transport.protocol import Range, TransportError, Work
from sharding.transport.works import Done


class NcclWork:
    """A collective in a stream of NCCL's."""

    def __init__(self, what: str, group: dist.ProcessGroup, flat: Tensor, work: dist.Work) -> None:
        self._what = what
        self._group = group
        self._flat = flat
        self._work = work

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
        if self._flat.is_cuda:
            # Who lets go of it may do so before the current stream, which need not be that in which
            # it was allocated, has come to the collective, and to what reads it afterwards.
            self._flat.record_stream(torch.cuda.current_stream(self._flat.device))

    def future(self) -> Future[Tensor]:
        """The buffer; whoever takes it has their stream wait, and no other stream does."""
        device = self._flat.device
        future: Future[Tensor] = Future(devices=[device])
        with torch.cuda.stream(torch.cuda.Stream(device)):
            self.wait()
            future.set_result(self._flat)
        return future


class NcclTransport:
    """NCCL's own collectives, in place; see :class:`~sharding.transport.Transport`.

    Ranges of one size, side by side in rank order, take one collective without any copy. Others
    take a reduce or a broadcast for each rank, which NCCL runs as one group. Nothing is added on
    the host. ``bytes_sent`` counts what a ring sends.

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
        if _even(cuts):
            whole = real[cuts[0][0] : cuts[-1][1]]
            work = dist.reduce_scatter_single(
                parts[self.rank], whole, group=self.group, async_op=True
            )
        else:
            work = dist.reduce_scatter(parts[self.rank], parts, group=self.group, async_op=True)
        self.bytes_sent += _other_bytes(parts, self.rank)
        return NcclWork("reduce_scatter", self.group, flat, work)

    def all_gather(self, flat: Tensor, ranges: Sequence[Range]) -> Work:
        """Hand ranges to all: see :meth:`sharding.transport.Transport.all_gather`."""
        check_buffer(flat, ranges, self.size)
        if self.size == 1:
            return Done(flat)
        raw, cuts = as_bytes(flat, ranges)
        parts = [raw[start:stop] for start, stop in cuts]
        if _even(cuts):
            whole = raw[cuts[0][0] : cuts[-1][1]]
            work = dist.all_gather_single(whole, parts[self.rank], group=self.group, async_op=True)
        else:
            work = dist.all_gather(parts, parts[self.rank], group=self.group, async_op=True)
        self.bytes_sent += _other_bytes(parts, (self.rank + 1) % self.size)
        return NcclWork("all_gather", self.group, flat, work)


def _even(cuts: Sequence[Range]) -> bool:
    sizes = {stop - start for start, stop in cuts}
    return len(sizes) == 1 and all(one[1] == other[0] for one, other in pairwise(cuts))


def _other_bytes(parts: Sequence[Tensor], rank: int) -> int:
    """In a ring, every part passes through every rank but one."""
    return sum(part.numel() * part.element_size() for at, part in enumerate(parts) if at != rank)
