"""Messages between the ranks of a group, and errors for messages that do not arrive."""

import itertools
import time
from collections.abc import Sequence
from datetime import timedelta
from enum import Enum
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from sharding.transport.groups import GroupRank, format_ranks, timeout_of
from sharding.transport.protocol import TransportError

CPU = torch.device("cpu")
GLANCE = timedelta(milliseconds=1)
NO_TIME = timedelta(0)
PROBE = (1 << 30) - 1
"""A tag under which no rank receives."""
ADVICE = "Ranks may differ now: end them all, and go on from the last checkpoint"

CHANNEL_BITS, NUMBER_BITS = 16, 14
"""The bits of a tag for the sequence, and for the operation of the sequence.

Numbers of operations start again after 16,384. Earlier messages have long been received by then.
"""
_CHANNELS: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""Number of message sequences made on each group."""


_FAILED: list[list["PartMessage"]] = []
"""Messages of failed launches, kept because gloo still writes to their memory."""


class MessageTags:
    """Tags for the messages of a sequence of operations on a group.

    The tags of two sequences differ, and also differ from the tags of users, which begin at 0. All
    ranks of a group must make their sequences in the same order.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        channel = _CHANNELS.get(group, 0)
        if channel >= 1 << CHANNEL_BITS:
            raise RuntimeError(
                f"{channel:,} sequences of messages were made on this process group, and there are "
                "tags for no more: further messages could be taken for those of another sequence. "
                "Every transport has 1 to 3 sequences, also after it is gone: keep transports, "
                "optimizers and hooks in place of making new ones, or make a new process group"
            )
        _CHANNELS[group] = channel + 1
        self._tags = (1 << 30) | channel << NUMBER_BITS
        self._count = itertools.count()

    def next(self) -> tuple[int, int]:
        """Return the number of the next operation, and its tag."""
        number = next(self._count)
        return number, self._tags | number % (1 << NUMBER_BITS)


class Direction(Enum):
    """Direction of a message, as this rank sees it."""

    FROM = "send"
    TO = "take"


class PartMessage(NamedTuple):
    """Launched message with a part of a buffer."""

    direction: Direction
    peer: GroupRank | None
    """The other rank; None for all other ranks."""
    elements: int
    work: dist.Work | None
    """None if the message could not be launched."""


def launch_message(
    operation: str,
    group: dist.ProcessGroup,
    direction: Direction,
    rank: int,
    part: Tensor,
    elements: int,
    tag: int,
) -> PartMessage:
    """Launch a message to or from one rank."""
    peer = GroupRank(rank)
    message = PartMessage(direction, peer, elements, None)
    try:
        if direction is Direction.TO:
            work = dist.isend(part, group=group, group_dst=peer, tag=tag)
        else:
            work = dist.irecv(part, group=group, group_src=peer, tag=tag)
    except RuntimeError as error:
        raise TransportError(format_lost(operation, group, message)) from error
    return message._replace(work=work)


def launch_messages(
    operation: str,
    group: dist.ProcessGroup,
    moves: Sequence[tuple[Direction, int, Tensor, int]],
    tag: int,
) -> list[PartMessage]:
    """Launch all messages of an operation, also after one fails: other ranks wait for theirs.

    Args:
        operation, group, tag: as for :func:`launch_message`.
        moves: the direction, the other rank, the part and its elements; empty parts are left out.

    Raises:
        TransportError: another rank is known to be dead. The other messages are launched.
    """
    messages: list[PartMessage] = []
    first: TransportError | None = None
    for direction, rank, part, count in moves:
        if part.numel():
            try:
                messages.append(launch_message(operation, group, direction, rank, part, count, tag))
            except TransportError as error:
                first = first or error
    if first is not None:
        _FAILED.append(messages)
        raise first
    return messages


def launch_broadcast(
    operation: str, group: dist.ProcessGroup, rank: int, part: Tensor, elements: int
) -> PartMessage:
    """Launch the broadcast of one rank's part."""
    is_root = rank == group.rank()
    direction, peer = (Direction.TO, None) if is_root else (Direction.FROM, GroupRank(rank))
    message = PartMessage(direction, peer, elements, None)
    try:
        work = dist.broadcast(part, group=group, group_src=rank, async_op=True)
    except RuntimeError as error:
        raise TransportError(format_lost(operation, group, message)) from error
    return message._replace(work=work)


def wait_messages(
    operation: str,
    group: dist.ProcessGroup,
    messages: Sequence[PartMessage],
    *,
    patient: bool = False,
    slack: timedelta = NO_TIME,
) -> None:
    """Wait for messages.

    Args:
        operation: the name of the operation, for errors.
        group: of the ranks.
        messages: in the order of waiting.
        patient: True to wait for the other messages after one is lost. So a message that this rank
            sends is not dropped while another rank waits for it.
        slack: time to wait in addition to the group's timeout.

    Raises:
        TransportError: names the ranks that did not come.
    """
    timeout = timeout_of(group, CPU) + slack
    start = time.monotonic()
    first: tuple[PartMessage, RuntimeError] | None = None
    for at, message in enumerate(messages):
        # All messages share one deadline, so that the delays of several ranks do not add up.
        left = max(timeout - timedelta(seconds=time.monotonic() - start), GLANCE)
        began = time.monotonic()
        error = _wait_error(message, left)
        if error is None:
            continue
        timed_out = timedelta(seconds=time.monotonic() - began) >= left
        # torch measures the timeout of a broadcast from its launch, which is before this wait.
        if not timed_out and not _is_timeout(error):
            first = first or (message, error)
            if patient:
                continue
            break
        others = [one for one in messages[at + 1 :] if _wait_error(one, GLANCE)]
        waited = time.monotonic() - start
        raise TransportError(format_absent(operation, group, [message, *others], waited)) from error
    if first is not None:
        raise TransportError(format_lost(operation, group, first[0])) from first[1]


def _is_timeout(error: RuntimeError) -> bool:
    """Return True if an error is a timeout, of this message or of another message of the rank."""
    text = str(error).lower()
    return "timed out" in text or "application timeout" in text


def _wait_error(message: PartMessage, timeout: timedelta) -> RuntimeError | None:
    """Wait for a message. Return torch's error if the message does not arrive in time."""
    try:
        if message.work is not None:
            message.work.wait(timeout)
    except RuntimeError as error:
        return error
    return None


def _peers(group: dist.ProcessGroup, message: PartMessage) -> list[GroupRank]:
    """Return the ranks that a message is sent to, or received from."""
    if message.peer is not None:
        return [message.peer]
    return [GroupRank(rank) for rank in range(group.size()) if rank != group.rank()]


def format_lost(operation: str, group: dist.ProcessGroup, message: PartMessage) -> str:
    """Return the error text for a closed connection."""
    # Other ranks relay the data of a broadcast, so the dead rank may not be its root.
    gone = [rank for rank in range(group.size()) if _is_gone(group, GroupRank(rank))]
    peers = format_ranks(group, _peers(group, message))
    whom = format_ranks(group, [GroupRank(rank) for rank in gone]) or peers
    doing = (
        f"taking {message.elements} elements from {peers}"
        if message.direction is Direction.FROM
        else f"sending {message.elements} elements to {peers}"
    )
    return (
        f"{operation}: {_format_self(group)} lost {whom} while {doing}: it died, or ended after an "
        f"error of its own. {ADVICE}"
    )


def _is_gone(group: dist.ProcessGroup, rank: GroupRank) -> bool:
    """Return True if the connection to a rank is closed. Use it only after the group has failed."""
    if rank == group.rank():
        return False
    try:
        dist.isend(torch.zeros(1, device="cpu"), group=group, group_dst=rank, tag=PROBE)
    except RuntimeError:
        return True
    return False


def format_absent(
    operation: str, group: dist.ProcessGroup, missing: Sequence[PartMessage], seconds: float
) -> str:
    """Return the error text for ranks that did not come in time."""
    waits = []
    for one in missing:
        peers = format_ranks(group, _peers(group, one))
        waits.append(f"{peers} to {one.direction.value} {one.elements} elements")
    return (
        f"{operation}: {_format_self(group)} waited {seconds:.1f} s for "
        f"{', and for '.join(waits)}, in vain: they (or, in a gather, ranks that pass their parts "
        "on) did not come to this operation within the group's timeout of "
        f"{timeout_of(group, CPU)}. {ADVICE}"
    )


def _format_self(group: dist.ProcessGroup) -> str:
    return f"{format_ranks(group, [GroupRank(group.rank())])} of {group.size()} ranks"
