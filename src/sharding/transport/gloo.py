"""The transport over gloo: parts to their owners, added in rank order; broadcasts back.

Measured at the loopback interface (32 MB, 2 and 4 ranks): gloo's own reduce-scatter sends what an
all-reduce sends, and takes 2 to 4 times as long; its all-gather takes 2 to 7 times as long as
broadcasts of the parts. Sending the parts of a gather from rank to rank instead of broadcasting
them takes 1.02 to 1.3 times as long, most where it overlaps with computation. A reduce_scatter and
an all_gather together send exactly an all-reduce's bytes.
"""

import itertools
from collections import deque
from collections.abc import Sequence
from functools import partial

import torch.distributed as dist
from torch import Tensor

from sharding.transport.buffers import as_bytes, as_real, check_buffer, divisor_of
from sharding.transport.messages import (
    Direction,
    MessageTags,
    PartMessage,
    broadcast,
    launched,
    receive,
)
from sharding.transport.ordered_sum import add_in_rank_order
from sharding.transport.protocol import Range, TransportError, Work
from sharding.transport.scratch import Scratch
from sharding.transport.works import Done, Launched


class GlooTransport:
    """Parts from rank to rank, on CPU tensors; see :class:`~sharding.transport.Transport`.

    Messages move by themselves, in gloo's threads. The sums are made in ``wait()``, by the thread
    that calls it. A rank keeps, for each reduce_scatter under way, scratch for what it receives:
    the size of its own range times the number of other ranks. It is reused.

    All ranks of a group must make their transports over it in the same order. ``bytes_sent`` counts
    a gathered part where it comes from, though over more than two ranks others pass it on.

    Args:
        group: the process group; its backend for CPU tensors must be gloo.
        in_flight: how many reduce_scatters may be under way; one more waits for the oldest first.

    Raises:
        ValueError: ``in_flight`` is less than 1.

    Example::

        >>> import torch
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> transport = GlooTransport(dist.group.WORLD)
        >>> flat = torch.tensor([1.0, 2.0])
        >>> transport.reduce_scatter(flat, [(0, 2)]).wait()
        >>> flat, transport.bytes_sent
        (tensor([1., 2.]), 0)
        >>> dist.destroy_process_group()
    """

    rank_ordered = True

    def __init__(self, group: dist.ProcessGroup, *, in_flight: int = 4) -> None:
        if in_flight < 1:
            raise ValueError(f"in_flight must be at least 1, got {in_flight}")
        self.group = group
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.bytes_sent = 0
        self.scratch = Scratch()
        """The memory for what is received before it is added."""
        self._in_flight = in_flight
        self._reducing: deque[Launched] = deque()
        self._gathering: deque[Launched] = deque()
        self._abandoned: list[list[PartMessage]] = []
        """Of operations that failed as they were launched; gloo must not lose what it writes to."""
        self.reduces = MessageTags(group)
        """Of the reduce_scatters."""
        self._gathers = itertools.count()

    def reduce_scatter(
        self, flat: Tensor, ranges: Sequence[Range], *, average: bool = False
    ) -> Work:
        """Sum in rank order: see :meth:`sharding.transport.Transport.reduce_scatter`."""
        check_buffer(flat, ranges, self.size)
        real, cuts = as_real(flat, ranges)
        if self.size == 1:
            return Done(flat)
        self._make_room()
        divisor = divisor_of(flat, ranges) if average else 1
        own = _part(real, cuts[self.rank])
        places = [rank for rank in range(self.size) if rank != self.rank]
        nbytes = own.numel() * own.element_size()
        buffer = self.scratch.take(len(places) * nbytes)
        received = [
            buffer[at * nbytes : (at + 1) * nbytes].view(own.dtype) for at in range(len(places))
        ]

        number, tag = self.reduces.next()
        into = dict(zip(places, received, strict=True))
        moves = []
        for step in range(1, self.size):  # every rank begins with another one
            source, target = (self.rank - step) % self.size, (self.rank + step) % self.size
            moves.append((Direction.FROM, source, into[source]))
            moves.append((Direction.TO, target, _part(real, cuts[target])))
        per_element = 2 if flat.is_complex() else 1
        what = f"reduce_scatter {number}"
        messages = self._launched(what, moves, per_element, tag)

        def finish() -> None:
            receive(what, self.group, messages)
            # Divided here, block by block in the cache, and not in passes of their own.
            add_in_rank_order(own, self.rank, received, divisor)
            self.scratch.give(buffer)

        work = Launched(finish)
        self._reducing.append(work)
        return work

    def _launched(
        self, what: str, moves: Sequence[tuple[Direction, int, Tensor]], per_element: int, tag: int
    ) -> list[PartMessage]:
        """Launch all messages, also where a rank is gone: the others wait for what is theirs.

        Raises:
            TransportError: another rank is known to be gone; the other messages are on their way.
        """
        messages: list[PartMessage] = []
        first: TransportError | None = None
        for direction, rank, part in moves:
            if not part.numel():
                continue
            count = part.numel() // per_element
            try:
                messages.append(launched(what, self.group, direction, rank, part, count, tag))
            except TransportError as error:
                first = first or error
            else:
                self._count(part, 1 if direction is Direction.TO else 0)
        if first is not None:
            self._abandoned.append(messages)
            raise first
        return messages

    def all_gather(self, flat: Tensor, ranges: Sequence[Range]) -> Work:
        """Hand ranges to all: see :meth:`sharding.transport.Transport.all_gather`."""
        check_buffer(flat, ranges, self.size)
        if self.size == 1:
            return Done(flat)
        raw, cuts = as_bytes(flat, ranges)
        while self._gathering and self._gathering[0].done:
            self._gathering.popleft()
        what = f"all_gather {next(self._gathers)}"
        messages = [
            broadcast(what, self.group, rank, _part(raw, cuts[rank]), stop - start)
            for rank, (start, stop) in enumerate(ranges)
            if start < stop
        ]
        self._count(_part(raw, cuts[self.rank]), self.size - 1)
        work = Launched(partial(receive, what, self.group, messages))
        self._gathering.append(work)  # gloo must not lose the memory that it writes to
        return work

    def _make_room(self) -> None:
        """Wait for the oldest reduce_scatter, if there are as many as there may be.

        This cannot hold up the others: what they need of us was launched before.
        """
        while self._reducing and (self._reducing[0].done or len(self._reducing) >= self._in_flight):
            self._reducing.popleft().wait()

    def _count(self, part: Tensor, times: int) -> None:
        self.bytes_sent += times * part.numel() * part.element_size()


def _part(flat: Tensor, cut: Range) -> Tensor:
    return flat[cut[0] : cut[1]]
