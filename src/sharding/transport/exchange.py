"""An exchange of messages between the ranks of a group, and what is done when all have come."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from enum import Enum
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from sharding.transport.peers import GroupRank, named, timeout_of
from sharding.transport.protocol import TransportError

CPU = torch.device("cpu")
GLANCE = timedelta(milliseconds=1)
PROBE = (1 << 30) - 1
"""A tag that nothing is received under."""
ADVICE = "Ranks may differ now: end them all, and go on from the last checkpoint"


class Kind(Enum):
    """Which way a message goes, as this rank sees it."""

    FROM = "send"
    TO = "take"


class Message(NamedTuple):
    """A piece on its way to or from other ranks."""

    kind: Kind
    peer: GroupRank | None
    """The other rank; None for all others."""
    elements: int
    work: dist.Work | None
    """None for one that could not be launched."""


def launched(
    what: str,
    group: dist.ProcessGroup,
    kind: Kind,
    rank: int,
    piece: Tensor,
    elements: int,
    tag: int,
) -> Message:
    """Launch one message.

    Raises:
        TransportError: the other rank is known to be gone.
    """
    peer = GroupRank(rank)
    try:
        if kind is Kind.TO:
            work = dist.isend(piece, group=group, group_dst=peer, tag=tag)
        else:
            work = dist.irecv(piece, group=group, group_src=peer, tag=tag)
    except RuntimeError as error:
        raise TransportError(_lost(what, group, Message(kind, peer, elements, None))) from error
    return Message(kind, peer, elements, work)


def broadcast(
    what: str, group: dist.ProcessGroup, rank: int, piece: Tensor, elements: int
) -> Message:
    """Launch the broadcast of one rank's piece.

    Raises:
        TransportError: another rank is known to be gone.
    """
    mine = rank == group.rank()
    kind, peer = (Kind.TO, None) if mine else (Kind.FROM, GroupRank(rank))
    try:
        work = dist.broadcast(piece, group=group, group_src=rank, async_op=True)
    except RuntimeError as error:
        raise TransportError(_lost(what, group, Message(kind, peer, elements, None))) from error
    return Message(kind, peer, elements, work)


class Done:
    """An operation with nothing to do: that of a group of one."""

    def __init__(self, flat: Tensor) -> None:
        self._flat = flat

    def wait(self) -> None:
        """Nothing to wait for."""

    def future(self) -> Future[Tensor]:
        """The buffer."""
        future: Future[Tensor] = Future()
        future.set_result(self._flat)
        return future


class Exchange:
    """Messages on their way.

    They move without any help. What follows them (sums) is done once, by the first thread that
    waits: the caller of :meth:`wait`, or, where :meth:`future` was asked for, the worker.

    Args:
        what: the operation, for errors.
        group: whose ranks exchange.
        flat: the buffer that the future hands out.
        messages: all that have to arrive.
        then: what follows.
        worker: the one thread in which futures are completed, in the order they were asked for.
    """

    def __init__(
        self,
        what: str,
        group: dist.ProcessGroup,
        flat: Tensor,
        messages: Sequence[Message],
        then: Callable[[], None],
        worker: ThreadPoolExecutor,
    ) -> None:
        self.done = False
        """Whether it has ended, well or not."""
        self._what = what
        self._group = group
        self._flat = flat
        self._messages = messages
        self._then = then
        self._worker = worker
        self._error: BaseException | None = None
        self._future: Future[Tensor] | None = None
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Return when all messages have arrived and what follows is done.

        Raises:
            TransportError: names the ranks that did not come.
        """
        with self._lock:
            if not self.done:
                try:
                    self._receive()
                    self._then()
                except BaseException as error:  # noqa: BLE001  Ctrl-C too: no message can be waited for twice
                    self._error = error
                self.done = True
                self._messages, self._then = (), _nothing
            if self._error is not None:
                raise self._error

    def future(self) -> Future[Tensor]:
        """The buffer, when the worker has waited."""
        if self._future is None:
            started: Future[None] = Future()
            # A callback, and not set_exception: DDP reads a future's value in C++, and would take
            # an exception that was set for the value.
            self._future = started.then(lambda _: self._waited())
            self._worker.submit(started.set_result, None)
        return self._future

    def _waited(self) -> Tensor:
        self.wait()
        return self._flat

    def _receive(self) -> None:
        timeout = timeout_of(self._group, CPU)
        start = time.monotonic()
        for at, message in enumerate(self._messages):
            # One deadline for all: ranks that come late, one after the other, do not add up.
            left = max(timeout - timedelta(seconds=time.monotonic() - start), GLANCE)
            asked = time.monotonic()
            error = _error_of(message, left)
            if error is None:
                continue
            waited_for_it = timedelta(seconds=time.monotonic() - asked) >= left
            # A broadcast has a clock of its own, which may have begun before ours.
            if not waited_for_it and "timed out" not in str(error).lower():
                raise TransportError(_lost(self._what, self._group, message)) from error
            absent = [one for one in self._messages[at + 1 :] if _error_of(one, GLANCE)]
            waited = time.monotonic() - start
            raise TransportError(
                _absent(self._what, self._group, [message, *absent], waited)
            ) from error


def _error_of(message: Message, timeout: timedelta) -> RuntimeError | None:
    """Wait for a message; torch's error, if it does not arrive in time."""
    try:
        if message.work is not None:
            message.work.wait(timeout)
    except RuntimeError as error:
        return error
    return None


def _peers(group: dist.ProcessGroup, message: Message) -> list[GroupRank]:
    """The ranks at the other end of a message."""
    if message.peer is not None:
        return [message.peer]
    return [GroupRank(rank) for rank in range(group.size()) if rank != group.rank()]


def _lost(what: str, group: dist.ProcessGroup, message: Message) -> str:
    """The text of an error: a connection was closed."""
    # What is broadcast is passed on, so the rank that is gone may be another than its owner.
    gone = [rank for rank in range(group.size()) if _is_gone(group, GroupRank(rank))]
    peers = named(group, _peers(group, message))
    lost = named(group, [GroupRank(rank) for rank in gone]) or peers
    doing = (
        f"taking {message.elements} elements from {peers}"
        if message.kind is Kind.FROM
        else f"sending {message.elements} elements to {peers}"
    )
    return (
        f"{what}: {_me(group)} lost {lost} while {doing}: it died, or ended after an error of its "
        f"own. {ADVICE}"
    )


def _is_gone(group: dist.ProcessGroup, rank: GroupRank) -> bool:
    """Whether the connection to a rank is closed. Asked only when the group is of no more use."""
    if rank == group.rank():
        return False
    try:
        dist.isend(torch.zeros(1), group=group, group_dst=rank, tag=PROBE)
    except RuntimeError:
        return True
    return False


def _absent(what: str, group: dist.ProcessGroup, missing: Sequence[Message], seconds: float) -> str:
    """The text of an error: ranks that did not come in time."""
    waits = [
        f"{named(group, _peers(group, one))} to {one.kind.value} {one.elements} elements"
        for one in missing
    ]
    return (
        f"{what}: {_me(group)} waited {seconds:.1f} s for {', and for '.join(waits)}, in vain: "
        "they (or, in a gather, ranks that pass their pieces on) did not come to this operation "
        f"within the group's timeout of {timeout_of(group, CPU)}. {ADVICE}"
    )


def _me(group: dist.ProcessGroup) -> str:
    return f"{named(group, [GroupRank(group.rank())])} of {group.size()} ranks"


def _nothing() -> None:
    """What follows an exchange that has ended."""
