"""Transport between ranks of one host, through shared memory instead of the network.

Over gloo, a byte is copied to the kernel, and copied again by the receiving rank. Here, a rank
copies its parts to memory that all ranks share, and announces them by short gloo messages. The
other ranks read the parts there. So a rank sleeps until the other ranks come, and gets gloo's error
if one of them dies. Small operations use gloo.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from sharding.transport.buffers import as_bytes, as_real, check_buffer, prepare_average
from sharding.transport.gloo import GlooTransport
from sharding.transport.messages import (
    Direction,
    MessageTags,
    PartMessage,
    launch_messages,
    wait_messages,
)
from sharding.transport.ordered_sum import add_in_rank_order
from sharding.transport.protocol import Range, Work
from sharding.transport.shared_slots import SharedSlots, can_share
from sharding.transport.work import PendingWork

SMALLEST = 1 << 16
"""Bytes of the smallest operation that uses shared memory."""

_Parts = Mapping[int, Tensor]
"""Parts of a buffer, as bytes, by the rank that gets or sends each."""


class _Queue:
    """Operations of one kind: their tags, their memory, and those that are not finished.

    Args:
        tags: of announcements.
        answers: tags of the answers to announcements.
    """

    def __init__(self, tags: MessageTags, answers: MessageTags) -> None:
        self.tags = tags
        self.answers = answers
        self.slots: SharedSlots | None = None
        self.has_asked = False
        """True if the ranks have already tried to share memory."""
        self.pending: deque[PendingWork] = deque()


class SharedMemoryTransport:
    """Transport through shared memory of one host; see :class:`~sharding.transport.Transport`.

    In the first large operation of each kind, all ranks check together if they can share memory:
    if they are on one host, and if no rank has the environment variable
    ``FUNCTIONAL_OPTIM_SHARED_MEMORY=0``. If they cannot, all operations use gloo, and give the same
    bits. The memory has no name in the file system, so nothing is left behind, and ``/dev/shm`` is
    not used.

    For each pending operation, a rank has a copy of the parts that it sends. The memory is reused.
    The thread that calls ``wait()`` computes the sum. ``bytes_sent`` includes the bytes that are
    sent over gloo.

    Args:
        gloo: for small operations, and for all operations if memory cannot be shared.
        in_flight: the largest number of pending operations of one kind. One more first waits for
            the oldest.

    Example::

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

    def __init__(self, gloo: GlooTransport, *, in_flight: int = 4) -> None:
        self.group: dist.ProcessGroup = gloo.group
        self.rank = gloo.rank
        self.size = gloo.size
        self._gloo, self._in_flight, self._sent = gloo, in_flight, 0
        self._reducing, self._gathering = (
            _Queue(tags, MessageTags(self.group))
            for tags in (gloo.reduce_tags, MessageTags(self.group))
        )

    @property
    def bytes_sent(self) -> int:
        """The bytes of tensors that this rank has sent to other ranks."""
        return self._sent + self._gloo.bytes_sent

    def reduce_scatter(
        self, flat: Tensor, ranges: Sequence[Range], *, average: bool = False
    ) -> Work:
        """Sum in rank order: see :meth:`sharding.transport.Transport.reduce_scatter`."""
        check_buffer(flat, ranges, self.size)
        slots = self._slots(self._reducing, flat, ranges)
        if slots is None:
            return self._gloo.reduce_scatter(flat, ranges, average=average)
        divisor = prepare_average(flat, ranges) if average else 1
        real, cuts = as_real(flat, ranges)
        raw, spans = as_bytes(flat, ranges)
        own = real[slice(*cuts[self.rank])]
        parts = {rank: raw[slice(*span)] for rank, span in enumerate(spans) if rank != self.rank}
        wanted = dict.fromkeys(parts, spans[self.rank][1] - spans[self.rank][0])

        def add(received: _Parts) -> None:
            if not received:
                return
            terms = [received[rank].view(own.dtype) for rank in sorted(received)]
            add_in_rank_order(own, self.rank, terms, divisor)

        return self._launch("reduce_scatter", self._reducing, slots, parts, wanted, add)

    def all_gather(self, flat: Tensor, ranges: Sequence[Range]) -> Work:
        """Gather ranges: see :meth:`sharding.transport.Transport.all_gather`."""
        check_buffer(flat, ranges, self.size)
        slots = self._slots(self._gathering, flat, ranges)
        if slots is None:
            return self._gloo.all_gather(flat, ranges)
        raw, spans = as_bytes(flat, ranges)
        others = [rank for rank in range(self.size) if rank != self.rank]
        parts = dict.fromkeys(others, raw[slice(*spans[self.rank])])
        targets = {rank: raw[slice(*spans[rank])] for rank in others}

        def copy(received: _Parts) -> None:
            for rank, part in received.items():
                targets[rank].copy_(part)

        wanted = {rank: target.numel() for rank, target in targets.items()}
        return self._launch("all_gather", self._gathering, slots, parts, wanted, copy)

    def _slots(self, queue: _Queue, flat: Tensor, ranges: Sequence[Range]) -> SharedSlots | None:
        """Return the memory for an operation, or None if it uses gloo; the same on all ranks."""
        elements = sum(stop - start for start, stop in ranges)
        if self.size == 1 or elements * flat.element_size() < SMALLEST:
            return None
        if not queue.has_asked:
            queue.slots = SharedSlots(self.group) if can_share(self.group) else None
            queue.has_asked = True
        return queue.slots

    def _launch(
        self,
        name: str,
        queue: _Queue,
        slots: SharedSlots,
        parts: _Parts,
        wanted: Mapping[int, int],
        take: Callable[[_Parts], None],
    ) -> Work:
        """Launch an operation.

        Args:
            name, queue: of its kind.
            slots: the memory of the kind.
            parts: for every other rank, the part that it gets, which may be empty.
            wanted: for every other rank, the number of bytes that this rank gets.
            take: processes the parts that this rank gets; it may overwrite them.
        """
        while queue.pending and (queue.pending[0].done or len(queue.pending) >= self._in_flight):
            queue.pending.popleft().wait()
        number, tag = queue.tags.next()
        operation, answer_tag = f"{name} {number}", queue.answers.next()[1]
        made = slots.write(parts)
        self._sent += sum(part.numel() for part in parts.values())
        received = {rank: torch.zeros_like(word) for rank, word in made.words.items()}
        moves = []
        for rank in (*range(self.rank + 1, self.size), *range(self.rank)):
            # Each rank begins with another one, so that no rank gets all messages first.
            moves.append((Direction.TO, rank, made.words[rank], parts[rank].numel()))
            moves.append((Direction.FROM, rank, received[rank], wanted[rank]))
        messages = launch_messages(operation, self.group, moves, tag)

        earlier = list(queue.pending)

        def finish() -> None:
            for one in earlier:  # all ranks finish in one order, since they answer each other
                one.wait()
            wait_messages(operation, self.group, messages)
            found = {}
            for rank, word in received.items():
                found[rank] = slots.read(operation, made.number, rank, word, wanted[rank])
            answers = self._answer(operation, made.is_new, received, answer_tag)
            take({rank: part for rank, part in found.items() if wanted[rank]})
            slots.finish(made.number)
            wait_messages(operation, self.group, answers)

        work = PendingWork(finish)
        queue.pending.append(work)
        return work

    def _answer(
        self, operation: str, is_new: bool, received: Mapping[int, Tensor], tag: int
    ) -> list[PartMessage]:
        """Tell every rank with a new slot that this rank has it, and expect the same for its own.

        A rank may end after an operation. The other ranks could not open its slot then.
        """
        word = torch.zeros(1, dtype=torch.uint8, device="cpu")
        moves = [(Direction.TO, rank, word, 1) for rank, one in received.items() if one[0]]
        if is_new:
            moves += [(Direction.FROM, rank, torch.empty_like(word), 1) for rank in received]
        return launch_messages(operation, self.group, moves, tag)
