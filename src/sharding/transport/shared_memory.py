"""Transport between ranks of one host, through shared memory instead of the network.

Over gloo, a byte is copied to the kernel, copied again by the receiving rank, and then added. Here,
a byte is copied once, to a chunk that fits the processor's cache, and added from there. Small
operations use gloo. Each part of a large operation is announced by a gloo message, so that a rank
sleeps until the other ranks come, and gets gloo's error if one of them dies.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from sharding.transport.buffers import as_bytes, as_real, check_buffer, prepare_average
from sharding.transport.gloo import GlooTransport
from sharding.transport.messages import (
    Direction,
    MessageTags,
    PartMessage,
    launch_message,
    wait_messages,
)
from sharding.transport.protocol import Range, TransportError, Work
from sharding.transport.ring_channel import RingChannel, create_channel
from sharding.transport.ring_reads import RingReads, add_chunks, copy_chunk
from sharding.transport.work import PendingWork

SMALLEST = 1 << 16
"""Bytes of the smallest operation that uses shared memory."""


class _OperationQueue:
    """Operations of one kind: their tags, their channel, and the thread that runs them in order."""

    def __init__(self, tags: MessageTags) -> None:
        self.tags = tags
        self.channel: RingChannel | None = None
        self.has_asked = False
        """True if the ranks have already tried to create the channel."""
        self.lock = threading.Lock()
        self.worker = ThreadPoolExecutor(1, "transport")


_Notice = tuple[Direction, int, int]
"""Announcement in an operation: its direction, the other rank, and the number of elements."""


class SharedMemoryTransport:
    """Transport through shared memory of one host; see :class:`~sharding.transport.Transport`.

    In the first large operation of each kind, all ranks check together if they can share memory:
    if they are on one host, with 8 MiB of memory for each rank, and if no rank has the environment
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
        self.group = gloo.group
        self.rank = gloo.rank
        self.size = gloo.size
        self._gloo = gloo
        # Each rank begins with a different one, so that no rank gets all messages first.
        self._others = [(self.rank + step) % self.size for step in range(1, self.size)]
        self._sent = 0
        self._reducing = _OperationQueue(gloo.reduce_tags)
        self._gathering = _OperationQueue(MessageTags(gloo.group))

    @property
    def bytes_sent(self) -> int:
        """The bytes of tensors that this rank has sent to other ranks."""
        return self._sent + self._gloo.bytes_sent

    def reduce_scatter(
        self, flat: Tensor, ranges: Sequence[Range], *, average: bool = False
    ) -> Work:
        """Sum in rank order: see :meth:`sharding.transport.Transport.reduce_scatter`."""
        check_buffer(flat, ranges, self.size)
        real, cuts = as_real(flat, ranges)
        channel = self._channel(self._reducing, real, cuts)
        if channel is None:
            return self._gloo.reduce_scatter(flat, ranges, average=average)
        divisor = prepare_average(flat, ranges) if average else 1
        own = real[slice(*cuts[self.rank])]
        parts = [(rank, real[slice(*cuts[rank])]) for rank in self._others]
        each = channel.chunk // real.element_size()
        last = channel.send(
            [
                (part[at : at + each], (rank,))
                for at in range(0, max(part.numel() for _, part in parts), each)
                for rank, part in parts
                if at < part.numel()
            ],
            divisor,
        )
        self._sent += sum(part.numel() for _, part in parts) * real.element_size()
        notices = [(Direction.TO, rank, _length(ranges[rank])) for rank in self._others]
        notices += [(Direction.FROM, rank, _length(ranges[self.rank])) for rank in self._others]
        add = partial(add_chunks, self.rank, divisor)
        lane = (list(channel.readers), _chunks(own, channel.chunk), add)
        reads = RingReads(channel.readers, [lane], last)
        return self._launch("reduce_scatter", self._reducing, channel, notices, reads)

    def all_gather(self, flat: Tensor, ranges: Sequence[Range]) -> Work:
        """Gather ranges: see :meth:`sharding.transport.Transport.all_gather`."""
        check_buffer(flat, ranges, self.size)
        raw, cuts = as_bytes(flat, ranges)
        channel = self._channel(self._gathering, raw, cuts)
        if channel is None:
            return self._gloo.all_gather(flat, ranges)
        own, others = raw[slice(*cuts[self.rank])], self._others
        last = channel.send([(chunk, others) for chunk in _chunks(own, channel.chunk)], 1)
        self._sent += own.numel() * len(others)
        notices = [(Direction.TO, rank, _length(ranges[self.rank])) for rank in others]
        notices += [(Direction.FROM, rank, _length(ranges[rank])) for rank in others]
        lanes = [
            ([rank], _chunks(raw[slice(*cuts[rank])], channel.chunk), copy_chunk) for rank in others
        ]
        reads = RingReads(channel.readers, lanes, last)
        return self._launch("all_gather", self._gathering, channel, notices, reads)

    def _channel(
        self, queue: _OperationQueue, flat: Tensor, cuts: Sequence[Range]
    ) -> RingChannel | None:
        """Return the channel for an operation, or None if it uses gloo; the same on all ranks."""
        if self.size == 1 or sum(map(_length, cuts)) * flat.element_size() < SMALLEST:
            return None
        with queue.lock:
            if not queue.has_asked:
                queue.channel = create_channel(self.group)
                queue.has_asked = True
            return queue.channel

    def _launch(
        self,
        name: str,
        queue: _OperationQueue,
        channel: RingChannel,
        notices: Sequence[_Notice],
        reads: RingReads,
    ) -> Work:
        number, tag = queue.tags.next()
        operation = f"{name} {number}"
        channel.push()
        messages, words = [], []
        for direction, rank, elements in notices:
            if elements:
                word = torch.tensor([elements if direction is Direction.TO else -1], device="cpu")
                words.append(word)
                messages.append(
                    launch_message(operation, self.group, direction, rank, word, elements, tag)
                )

        def run() -> None:
            wait_messages(operation, self.group, messages)
            _check_words(operation, messages, words)
            channel.finish(operation, reads, messages)

        return PendingWork(queue.worker.submit(run).result)


def _chunks(part: Tensor, nbytes: int) -> Sequence[Tensor]:
    """Return the chunks of a part; an empty part has none."""
    return part.split(nbytes // part.element_size()) if part.numel() else ()


def _length(cut: Range) -> int:
    return cut[1] - cut[0]


def _check_words(operation: str, messages: Sequence[PartMessage], words: Sequence[Tensor]) -> None:
    """Check that the other ranks announce the expected numbers of elements."""
    for one, word in zip(messages, words, strict=True):
        if word.item() != one.elements:
            raise TransportError(
                f"{operation}: group rank {one.peer} sends {word.item()} elements, where "
                f"{one.elements} are expected; all ranks must launch the same operations, in "
                "the same order"
            )
