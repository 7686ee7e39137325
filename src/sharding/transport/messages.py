"""Messages between the ranks of a group, and what is said of those that do not arrive."""

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

from sharding.transport.peers import GroupRank, named, timeout_of
from sharding.transport.protocol import TransportError

CPU = torch.device("cpu")
GLANCE = timedelta(milliseconds=1)
NO_TIME = timedelta(0)
PROBE = (1 << 30) - 1
"""A tag that nothing is received under."""
ADVICE = "Ranks may differ now: end them all, and go on from the last checkpoint"

CHANNEL_BITS, NUMBER_BITS = 16, 14
"""The bits of a tag: a sequence of messages, and an operation of that sequence.

Numbers of operations start again after 16,384: what is under way then has long been received.
"""
_CHANNELS: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""Number of message sequences made on each group."""


class MessageTags:
    """A sequence of operations on a group, each with the tag of its messages.

    Messages find their place by it: those of two sequences are never taken for one another, and
    never for those of a user, whose tags begin at 0. All ranks of a group must make their sequences
    in the same order.

    Raises:
        RuntimeError: the group has had as many sequences as there are tags for.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        channel = _CHANNELS.get(group, 0)
        if channel >= 1 << CHANNEL_BITS:
            raise RuntimeError(
                f"{channel:,} sequences of messages were made on this process group, and there are "
                "tags for no more: further messages could be taken for those of another sequence. "
                "Every transport has one or two sequences, also after it is gone: keep transports, "
                "optimizers and hooks in place of making new ones, or make a new process group"
            )
        _CHANNELS[group] = channel + 1
        self._tags = (1 << 30) | channel << NUMBER_BITS
        self._count = itertools.count()

    def next(self) -> tuple[int, int]:
        """A number, and its tag."""
        number = next(self._count)
        return number, self._tags | number % (1 << NUMBER_BITS)


class Direction(Enum):
    """Direction of a message, as this rank sees it."""

    FROM = "send"
    TO = "take"


class PartMessage(NamedTuple):
    """A part on its way to or from other ranks."""

    direction: Direction
    peer: GroupRank | None
    """The other rank; None for all others."""
    elements: int
    work: dist.Work | None
    """None for one that could not be launched."""


def launched(
    what: str,
    group: dist.ProcessGroup,
    direction: Direction,
    rank: int,
    part: Tensor,
    elements: int,
    tag: int,
) -> PartMessage:
    """Launch one message.

    Raises:
        TransportError: the other rank is known to be gone.
    """
    peer = GroupRank(rank)
    try:
        if direction is Direction.TO:
            work = dist.isend(part, group=group, group_dst=peer, tag=tag)
        else:
            work = dist.irecv(part, group=group, group_src=peer, tag=tag)
    except RuntimeError as error:
        raise TransportError(
            lost(what, group, PartMessage(direction, peer, elements, None))
        ) from error
    return PartMessage(direction, peer, elements, work)


def broadcast(
    what: str, group: dist.ProcessGroup, rank: int, part: Tensor, elements: int
) -> PartMessage:
    """Launch the broadcast of one rank's part.

    Raises:
        TransportError: another rank is known to be gone.
    """
    mine = rank == group.rank()
    direction, peer = (Direction.TO, None) if mine else (Direction.FROM, GroupRank(rank))
    try:
        work = dist.broadcast(part, group=group, group_src=rank, async_op=True)
    except RuntimeError as error:
        raise TransportError(
            lost(what, group, PartMessage(direction, peer, elements, None))
        ) from error
    return PartMessage(direction, peer, elements, work)


def receive(
    what: str,
    group: dist.ProcessGroup,
    messages: Sequence[PartMessage],
    *,
    patient: bool = False,
    slack: timedelta = NO_TIME,
) -> None:
    """Wait for messages.

    Args:
        what: they belong to, for errors.
        group: of the ranks.
        messages: in the order in which they are waited for.
        patient: wait for the others, too, once one is lost: of those that this rank sends, none is
            given up while another rank waits for it.
        slack: time to wait beyond the group's timeout.

    Raises:
        TransportError: names the ranks that did not come.
    """
    timeout = timeout_of(group, CPU) + slack
    start = time.monotonic()
    first: tuple[PartMessage, RuntimeError] | None = None
    for at, message in enumerate(messages):
        # One deadline for all: ranks that come late, one after the other, do not add up.
        left = max(timeout - timedelta(seconds=time.monotonic() - start), GLANCE)
        asked = time.monotonic()
        error = _error_of(message, left)
        if error is None:
            continue
        waited_for_it = timedelta(seconds=time.monotonic() - asked) >= left
        # A broadcast has a clock of its own, which may have begun before ours.
        if not waited_for_it and not _says_that_time_is_up(error):
            first = first or (message, error)
            if patient:
                continue
            break
        others = [one for one in messages[at + 1 :] if _error_of(one, GLANCE)]
        waited = time.monotonic() - start
        raise TransportError(absent(what, group, [message, *others], waited)) from error
    if first is not None:
        raise TransportError(lost(what, group, first[0])) from first[1]


def _says_that_time_is_up(error: RuntimeError) -> bool:
    """Return True if an error is a timeout, of this message or of another one of the rank."""
    text = str(error).lower()
    return "timed out" in text or "application timeout" in text


def _error_of(message: PartMessage, timeout: timedelta) -> RuntimeError | None:
    """Wait for a message; torch's error, if it does not arrive in time."""
    try:
        if message.work is not None:
            message.work.wait(timeout)
    except RuntimeError as error:
        return error
    return None


def _peers(group: dist.ProcessGroup, message: PartMessage) -> list[GroupRank]:
    """The ranks at the other end of a message."""
    if message.peer is not None:
        return [message.peer]
    return [GroupRank(rank) for rank in range(group.size()) if rank != group.rank()]


def lost(what: str, group: dist.ProcessGroup, message: PartMessage) -> str:
    """The text of an error: a connection was closed."""
    # What is broadcast is passed on, so the rank that is gone may be another than its owner.
    gone = [rank for rank in range(group.size()) if _is_gone(group, GroupRank(rank))]
    peers = named(group, _peers(group, message))
    whom = named(group, [GroupRank(rank) for rank in gone]) or peers
    doing = (
        f"taking {message.elements} elements from {peers}"
        if message.direction is Direction.FROM
        else f"sending {message.elements} elements to {peers}"
    )
    return (
        f"{what}: {_me(group)} lost {whom} while {doing}: it died, or ended after an error of its "
        f"own. {ADVICE}"
    )


def _is_gone(group: dist.ProcessGroup, rank: GroupRank) -> bool:
    """Return True if the connection to a rank is closed. Only for a group that has failed."""
    if rank == group.rank():
        return False
    try:
        dist.isend(torch.zeros(1), group=group, group_dst=rank, tag=PROBE)
    except RuntimeError:
        return True
    return False


def absent(
    what: str, group: dist.ProcessGroup, missing: Sequence[PartMessage], seconds: float
) -> str:
    """The text of an error: ranks that did not come in time."""
    waits = [
        f"{named(group, _peers(group, one))} to {one.direction.value} {one.elements} elements"
        for one in missing
    ]
    return (
        f"{what}: {_me(group)} waited {seconds:.1f} s for {', and for '.join(waits)}, in vain: "
        "they (or, in a gather, ranks that pass their parts on) did not come to this operation "
        f"within the group's timeout of {timeout_of(group, CPU)}. {ADVICE}"
    )


def _me(group: dist.ProcessGroup) -> str:
    return f"{named(group, [GroupRank(group.rank())])} of {group.size()} ranks"
