"""The transport between ranks of one host: through memory that they share, and not its network.

Over gloo a byte is copied into the kernel, by another rank out of it again, and added then. Here it
is copied once, into a chunk small enough to stay in the processor's cache, and added from there.
What is small goes over gloo, and so does a word for each part, to say that it is coming: who waits
for a rank that has not come sleeps, and finds out by gloo when it died.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from sharding.transport.buffers import as_bytes, as_real, check_buffer, divisor_of
from sharding.transport.gloo import GlooTransport
from sharding.transport.messages import Direction, MessageTags, launched, receive
from sharding.transport.protocol import Range, TransportError, Work
from sharding.transport.ring_channel import RingChannel, made_together
from sharding.transport.taking import Copies, Sum, Taking

SMALLEST = 1 << 16
"""Bytes of an operation from which it goes through shared memory."""


class _Operations:
    """Operations of one kind: their order, and the thread in which they are done."""

    def __init__(self, numbers: MessageTags) -> None:
        self.numbers = numbers
        self.channel: RingChannel | None = None
        self.asked = False
        self.asking = threading.Lock()
        self.worker = ThreadPoolExecutor(1, "transport")


class _Notice(NamedTuple):
    """Notice at the beginning of an operation: how much a rank sends."""

    direction: Direction
    rank: int
    elements: int


class SharedMemoryTransport:
    """Parts from rank to rank of one host; see :class:`~sharding.transport.Transport`.

    The first large operation of each kind finds out, together with all other ranks, whether memory
    can be shared: whether all are on one host, with 8 MiB of memory for each rank, and none of them
    has the environment variable ``FUNCTIONAL_OPTIM_SHARED_MEMORY=0``. Where it cannot, everything
    goes over gloo, to the same bits. The memory has no name in the file system: nothing of it stays
    behind, and nothing of ``/dev/shm`` is used.

    Sums and copies are made in two threads of the transport, one for each kind of operation, in the
    order in which they were launched. ``bytes_sent`` counts what other ranks are handed, whichever
    way.

    Args:
        gloo: for all that is small, and for everything where memory cannot be shared.

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
        # Each rank begins with another one.
        self._others = [(self.rank + step) % self.size for step in range(1, self.size)]
        self._sent = 0
        self._reducing = _Operations(gloo.reduces)
        self._gathering = _Operations(MessageTags(gloo.group))

    @property
    def bytes_sent(self) -> int:
        """The bytes of tensors that this rank has handed to other ranks."""
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
        divisor = divisor_of(flat, ranges) if average else 1
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
        notices = [_Notice(Direction.TO, rank, _length(ranges[rank])) for rank in self._others]
        notices += [
            _Notice(Direction.FROM, rank, _length(ranges[self.rank])) for rank in self._others
        ]
        taking = Sum(channel.readers, _chunks(own, channel.chunk), self.rank, divisor, last)
        return self._launched("reduce_scatter", self._reducing, channel, notices, taking)

    def all_gather(self, flat: Tensor, ranges: Sequence[Range]) -> Work:
        """Hand ranges to all: see :meth:`sharding.transport.Transport.all_gather`."""
        check_buffer(flat, ranges, self.size)
        raw, cuts = as_bytes(flat, ranges)
        channel = self._channel(self._gathering, raw, cuts)
        if channel is None:
            return self._gloo.all_gather(flat, ranges)
        own, others = raw[slice(*cuts[self.rank])], self._others
        last = channel.send([(chunk, others) for chunk in _chunks(own, channel.chunk)], 1)
        self._sent += own.numel() * len(others)
        notices = [_Notice(Direction.TO, rank, _length(ranges[self.rank])) for rank in others]
        notices += [_Notice(Direction.FROM, rank, _length(ranges[rank])) for rank in others]
        targets = {rank: _chunks(raw[slice(*cuts[rank])], channel.chunk) for rank in others}
        taking = Copies(channel.readers, targets, last)
        return self._launched("all_gather", self._gathering, channel, notices, taking)

    def _channel(
        self, operations: _Operations, flat: Tensor, cuts: Sequence[Range]
    ) -> RingChannel | None:
        """Return the channel of an operation, the same on all ranks; None for gloo."""
        if self.size == 1 or sum(map(_length, cuts)) * flat.element_size() < SMALLEST:
            return None
        with operations.asking:
            if not operations.asked:
                operations.channel = made_together(self.group)
                operations.asked = True
            return operations.channel

    def _launched(
        self,
        name: str,
        operations: _Operations,
        channel: RingChannel,
        notices: Sequence[_Notice],
        taking: Taking,
    ) -> Work:
        number, tag = operations.numbers.next()
        what = f"{name} {number}"
        channel.push()
        words = [
            torch.tensor([one.elements if one.direction is Direction.TO else -1], device="cpu")
            for one in notices
        ]
        messages = [
            launched(what, self.group, one.direction, one.rank, word, one.elements, tag)
            for one, word in zip(notices, words, strict=True)
            if one.elements
        ]

        def run() -> None:
            receive(what, self.group, messages)
            _check(what, notices, words)
            channel.finish(what, taking, messages)

        return _Job(operations.worker, run)


class _Job:
    """An operation that a thread of the transport does, after those that were launched before."""

    def __init__(self, worker: ThreadPoolExecutor, run: Callable[[], None]) -> None:
        self._job = worker.submit(run)

    def wait(self) -> None:
        """Return when it is done.

        Raises:
            TransportError: names the ranks that did not come.
        """
        self._job.result()


def _chunks(part: Tensor, nbytes: int) -> Sequence[Tensor]:
    """A part, cut; one that is empty is none."""
    return part.split(nbytes // part.element_size()) if part.numel() else ()


def _length(cut: Range) -> int:
    return cut[1] - cut[0]


def _check(what: str, notices: Sequence[_Notice], words: Sequence[Tensor]) -> None:
    """Make sure that what the others say they send is what is expected."""
    for one, word in zip(notices, words, strict=True):
        if one.elements and word.item() != one.elements:
            raise TransportError(
                f"{what}: group rank {one.rank} sends {word.item()} elements, where "
                f"{one.elements} are expected; all ranks must launch the same operations, in "
                "the same order"
            )
