"""All-gather of a few bytes, by messages between pairs of ranks, in rounds of twice the distance.

In round k each rank sends all that it has to the rank 2^k behind it. After log2(W) rounds every
rank has what every rank began with. A rank sends log2(W) messages in place of W - 1.
"""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from sharding.transport.messages import (
    CPU,
    Direction,
    PartMessage,
    launched,
    lost,
    receive,
)
from sharding.transport.peers import GroupRank, timeout_of
from sharding.transport.protocol import TransportError

TAG = (1 << 29) + 1
"""Of the messages of these exchanges; no other messages have it."""
THERE, GONE, UNKNOWN = 1, 0, 2
"""What a rank knows of the bytes of another one. They are unknown if a rank that was to pass them
on is gone."""
SLACK = 8
"""In each round a rank waits longer than in the round before, by this part of the timeout: a rank
that has waited in vain says so to those that wait for it, before they give it up."""


def disseminated(
    group: dist.ProcessGroup, own: Tensor, lengths: Sequence[int], what: str
) -> list[Tensor]:
    """Return the bytes of every rank, in the order of group ranks. Collective.

    A rank that finds another one gone goes through all rounds, and passes on who is gone.

    Args:
        group: whose ranks; its backend has messages.
        own: the bytes of this rank, on the CPU.
        lengths: how many bytes each rank has.
        what: the ranks are doing, for errors.

    Raises:
        TransportError: a rank died or did not come; names it.
    """
    blocks = _Blocks(own, lengths, group.rank())
    sent: list[PartMessage] = []
    first: TransportError | None = None
    slack, reach = timedelta(0), 1
    while reach < group.size():
        for direction in (Direction.TO, Direction.FROM):  # each sends before it waits
            step = reach if direction is Direction.TO else -reach
            peer = (group.rank() + step) % group.size()
            begin = group.rank() if direction is Direction.TO else peer
            chosen = [(begin - k) % group.size() for k in range(min(reach, group.size() - reach))]
            try:
                if direction is Direction.TO:
                    part = blocks.packed(chosen)
                    sent.append(_launched(what, group, direction, peer, part))
                else:
                    room = blocks.room(chosen)
                    coming = _launched(what, group, direction, peer, room)
                    receive(what, group, [coming], slack=slack)
                    blocks.unpack(chosen, room)
            except TransportError as error:
                first = first or error
                blocks.known[peer] = GONE
        slack += timeout_of(group, CPU) / SLACK
        reach *= 2
    try:
        receive(what, group, sent, patient=True, slack=slack)
    except TransportError as error:
        first = first or error
    missing = [rank for rank, known in enumerate(blocks.known) if known != THERE]
    if first is None and missing:
        gone = [rank for rank in missing if blocks.known[rank] == GONE] or missing
        message = PartMessage(Direction.FROM, GroupRank(gone[0]), lengths[gone[0]], None)
        first = TransportError(lost(what, group, message))
    if first is not None:
        raise first
    return blocks.bytes


def _launched(
    what: str, group: dist.ProcessGroup, direction: Direction, peer: int, part: Tensor
) -> PartMessage:
    return launched(what, group, direction, peer, part, part.numel(), TAG)


class _Blocks:
    """The bytes of each rank, as far as this rank has them."""

    def __init__(self, own: Tensor, lengths: Sequence[int], rank: int) -> None:
        self.bytes = [torch.empty(length, dtype=torch.uint8, device=CPU) for length in lengths]
        self.bytes[rank] = own
        self.known = [UNKNOWN] * len(lengths)
        self.known[rank] = THERE

    def packed(self, chosen: Sequence[int]) -> Tensor:
        """Return what is known of some ranks, and their bytes, as one message."""
        head = torch.tensor([self.known[one] for one in chosen], dtype=torch.uint8, device=CPU)
        return torch.cat([head, *(self.bytes[one] for one in chosen)])

    def room(self, chosen: Sequence[int]) -> Tensor:
        """Return memory for a message about some ranks."""
        length = len(chosen) + sum(self.bytes[one].numel() for one in chosen)
        return torch.empty(length, dtype=torch.uint8, device=CPU)

    def unpack(self, chosen: Sequence[int], message: Tensor) -> None:
        """Take a message that has come."""
        head, rest = message[: len(chosen)].tolist(), message[len(chosen) :]
        parts = rest.split([self.bytes[one].numel() for one in chosen])
        for one, known, part in zip(chosen, head, parts, strict=True):
            if known == THERE:
                self.bytes[one].copy_(part)
            if self.known[one] == UNKNOWN:
                self.known[one] = known
