"""All-gather of a few bytes, by messages between pairs of ranks, at distances 1, 2, 4 and so on.

In round k, each rank sends all bytes that it has to the rank 2^k after it. After log2(W) rounds,
every rank has the bytes of every rank. So a rank sends log2(W) messages instead of W - 1.
"""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from sharding.transport.groups import GroupRank, timeout_of
from sharding.transport.messages import (
    CPU,
    Direction,
    PartMessage,
    format_lost,
    launch_message,
    wait_messages,
)
from sharding.transport.protocol import TransportError

TAG = (1 << 29) + 1
"""Tag of these messages, different from the tags of all other messages."""
THERE, GONE, UNKNOWN = 1, 0, 2
"""What a rank knows of the bytes of another rank. UNKNOWN: the rank that was to pass them on is
gone."""
SLACK = 8
"""In each round a rank waits longer than in the round before, by this fraction of the timeout. So a
rank whose wait timed out can tell the ranks that wait for it, before they time out, too."""


def disseminate(
    group: dist.ProcessGroup, own: Tensor, lengths: Sequence[int], what: str
) -> list[Tensor]:
    """Return the bytes of every rank, in the order of group ranks. Collective.

    A rank that finds another rank gone still runs all rounds, and passes on which rank is gone.

    Args:
        group: the ranks. The backend of the group has messages.
        own: the bytes of this rank, on the CPU.
        lengths: the number of bytes of each rank.
        what: the ranks are doing, for errors such as TransportError, which names a lost rank.
    """
    blocks = _Blocks(own, lengths, group.rank())
    sent: list[PartMessage] = []
    first: TransportError | None = None
    slack, reach = timedelta(0), 1
    while reach < group.size():
        for direction in (Direction.TO, Direction.FROM):  # each rank sends before it waits
            step = reach if direction is Direction.TO else -reach
            peer = (group.rank() + step) % group.size()
            begin = group.rank() if direction is Direction.TO else peer
            chosen = [(begin - k) % group.size() for k in range(min(reach, group.size() - reach))]
            try:
                if direction is Direction.TO:
                    part = blocks.pack(chosen)
                    sent.append(_launch(what, group, direction, peer, part))
                else:
                    room = blocks.empty_message(chosen)
                    coming = _launch(what, group, direction, peer, room)
                    wait_messages(what, group, [coming], slack=slack)
                    blocks.unpack(chosen, room)
            except TransportError as error:
                first = first or error
                blocks.known[peer] = GONE
        slack += timeout_of(group, CPU) / SLACK
        reach *= 2
    try:
        wait_messages(what, group, sent, patient=True, slack=slack)
    except TransportError as error:
        first = first or error
    missing = [rank for rank, known in enumerate(blocks.known) if known != THERE]
    if first is None and missing:
        gone = [rank for rank in missing if blocks.known[rank] == GONE] or missing
        message = PartMessage(Direction.FROM, GroupRank(gone[0]), lengths[gone[0]], None)
        first = TransportError(format_lost(what, group, message))
    if first is not None:
        raise first
    return blocks.bytes


def _launch(
    what: str, group: dist.ProcessGroup, direction: Direction, peer: int, part: Tensor
) -> PartMessage:
    return launch_message(what, group, direction, peer, part, part.numel(), TAG)


class _Blocks:
    """Bytes of each rank, as far as this rank has them."""

    def __init__(self, own: Tensor, lengths: Sequence[int], rank: int) -> None:
        self.bytes = [torch.empty(length, dtype=torch.uint8, device=CPU) for length in lengths]
        self.bytes[rank] = own
        self.known = [UNKNOWN] * len(lengths)
        self.known[rank] = THERE

    def pack(self, chosen: Sequence[int]) -> Tensor:
        """Return the flags and the bytes of some ranks, as one message."""
        head = torch.tensor([self.known[one] for one in chosen], dtype=torch.uint8, device=CPU)
        return torch.cat([head, *(self.bytes[one] for one in chosen)])

    def empty_message(self, chosen: Sequence[int]) -> Tensor:
        """Return an empty tensor for a message about some ranks."""
        length = len(chosen) + sum(self.bytes[one].numel() for one in chosen)
        return torch.empty(length, dtype=torch.uint8, device=CPU)

    def unpack(self, chosen: Sequence[int], message: Tensor) -> None:
        """Read a received message about some ranks."""
        head, rest = message[: len(chosen)].tolist(), message[len(chosen) :]
        parts = rest.split([self.bytes[one].numel() for one in chosen])
        for one, known, part in zip(chosen, head, parts, strict=True):
            if known == THERE:
                self.bytes[one].copy_(part)
            if self.known[one] == UNKNOWN:
                self.known[one] = known
