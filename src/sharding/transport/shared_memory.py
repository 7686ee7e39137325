"""Transport between ranks of one host, through shared memory instead of the network.

Over gloo, a byte is copied to the kernel, and copied again by the receiving rank. Here, a rank
copies its parts to memory that all ranks share, piece by piece, and announces each piece by a short
gloo message. The other ranks read it there. So a rank sleeps until the other ranks come, and gets
gloo's error if one of them dies. Small operations use gloo.
"""

import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist
from torch import Tensor

from sharding.transport.buffers import as_bytes, as_real, check_buffer, prepare_average
from sharding.transport.gloo import GlooTransport
from sharding.transport.messages import MessageTags
from sharding.transport.ordered_sum import add_in_rank_order
from sharding.transport.protocol import Range, Work
from sharding.transport.shared_slots import PieceExchange, SharedSlots, share_memory
from sharding.transport.work import PendingWork

SMALLEST = 1 << 16
"""Bytes of the smallest operation that uses shared memory."""


class _Queue:
    """Operations of one kind, which a thread runs in the order of their launches."""

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        self._name, self._group = name, group
        self._tags = MessageTags(group)
        self._count = itertools.count()
        self._thread = ThreadPoolExecutor(1, f"functional_optim {name}")
        self._has_asked = False
        """True if the ranks have already tried to share memory."""
        self.slots: SharedSlots | None = None

    def find_slots(self, nbytes: int) -> SharedSlots | None:
        """Return the memory for an operation, or None if it uses gloo; the same on all ranks."""
        if self._group.size() == 1 or nbytes < SMALLEST:
            return None
        if not self._has_asked:
            self.slots = share_memory(self._group, self._tags)
            self._has_asked = True
        return self.slots

    def launch(self, slots: SharedSlots, exchange: PieceExchange) -> Work:
        """Let the thread run an operation."""
        exchange.name = f"{self._name} {next(self._count)}"
        return PendingWork(self._thread.submit(slots.run, exchange).result)


class SharedMemoryTransport:
    """Transport through shared memory of one host; see :class:`~sharding.transport.Transport`.

    In the first large operation of each kind, all ranks check together if they can share memory:
    if they are on one host, with 64 MiB of memory for all ranks, and if no rank has the environment
    variable ``FUNCTIONAL_OPTIM_SHARED_MEMORY=0``. If they cannot, all operations use gloo, and give
    the same bits. The memory has no name in the file system, so nothing is left behind, and
    ``/dev/shm`` is not used.

    Two threads of the transport compute sums and copies, one for each kind of operation, in the
    order of launches. ``bytes_sent`` includes the bytes that are sent over gloo.

    Args:
        gloo: for small operations, and for all operations if memory cannot be shared.

    Example::

        >>> import torch
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> transport = SharedMemoryTransport(GlooTransport(dist.group.WORLD))
        >>> flat = torch.tensor([1.0, 2.0])
        >>> transport.reduce_scatter(flat, [(0, 2)]).wait()
        >>> flat
        tensor([1., 2.])
        >>> dist.destroy_process_group()
    """

    rank_ordered = True

    def __init__(self, gloo: GlooTransport) -> None:
        self.group: dist.ProcessGroup = gloo.group
        self.rank = gloo.rank
        self.size = gloo.size
        self._gloo, self._sent = gloo, 0
        self._others = [rank for rank in range(self.size) if rank != self.rank]
        self._reducing = _Queue("reduce_scatter", self.group)
        self._gathering = _Queue("all_gather", self.group)

    @property
    def bytes_sent(self) -> int:
        """The bytes of tensors that this rank has sent to other ranks."""
        return self._sent + self._gloo.bytes_sent

    def reduce_scatter(
        self, flat: Tensor, ranges: Sequence[Range], *, average: bool = False
    ) -> Work:
        """Sum in rank order: see :meth:`sharding.transport.Transport.reduce_scatter`."""
        check_buffer(flat, ranges, self.size)
        real, _ = as_real(flat, ranges)
        raw, spans = as_bytes(flat, ranges)
        sizes = [stop - start for start, stop in spans]
        slots = self._reducing.find_slots(sum(sizes))
        if slots is None:
            return self._gloo.reduce_scatter(flat, ranges, average=average)
        divisor = prepare_average(flat, ranges) if average else 1
        own = raw[slice(*spans[self.rank])]

        def add(piece: slice, received: Mapping[int, Tensor]) -> None:
            terms = [term.view(real.dtype) for term in received.values()]
            add_in_rank_order(own[piece].view(real.dtype), self.rank, terms, divisor)

        sent = {rank: raw[slice(*spans[rank])] for rank in self._others}
        self._sent += sum(sizes) - own.numel()
        owners = sum(map(bool, sizes))
        # A rank that owns something sends nothing to itself.
        pieces = slots.cut(max(sizes), owners if owners < self.size else owners - 1)
        wanted = dict.fromkeys(self._others, own.numel())
        return self._reducing.launch(slots, PieceExchange(sent, wanted, add, pieces))

    def all_gather(self, flat: Tensor, ranges: Sequence[Range]) -> Work:
        """Gather ranges: see :meth:`sharding.transport.Transport.all_gather`."""
        check_buffer(flat, ranges, self.size)
        raw, spans = as_bytes(flat, ranges)
        sizes = [stop - start for start, stop in spans]
        slots = self._gathering.find_slots(sum(sizes))
        if slots is None:
            return self._gloo.all_gather(flat, ranges)
        sent = dict.fromkeys(self._others, raw[slice(*spans[self.rank])])
        targets = {rank: raw[slice(*spans[rank])] for rank in self._others}

        def copy(piece: slice, received: Mapping[int, Tensor]) -> None:
            for rank, part in received.items():
                targets[rank][piece].copy_(part)

        self._sent += sizes[self.rank] * len(sent)
        wanted = {rank: sizes[rank] for rank in self._others}
        exchange = PieceExchange(sent, wanted, copy, slots.cut(max(sizes)))
        return self._gathering.launch(slots, exchange)
