"""Slots in memory that all ranks of a host share, through which pieces of tensors pass."""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from sharding.transport import segment
from sharding.transport.messages import (
    ADVICE,
    Direction,
    MessageTags,
    launch_broadcast,
    launch_messages,
    wait_messages,
)
from sharding.transport.protocol import TransportError
from sharding.transport.segment import NOWHERE, Address, SharedSegment

SWITCH = "FUNCTIONAL_OPTIM_SHARED_MEMORY"
"""Environment variable. If it is 0 on any rank, all ranks use the network."""
MOST = 64
"""The largest number of ranks of a group that share memory."""
SLOTS = 2
"""Slots of a rank. When a rank writes piece n, it has read piece n - 1, so all ranks have announced
that piece. A rank announces a piece when it has read the piece before it. So piece n - 2 has been
read by all ranks, and its slot is free."""
SHARED_BYTES = 1 << 26
"""Bytes of the slots of all ranks together."""
ALIGNMENT = 64


@dataclass(eq=False)
class PieceExchange:
    """Operation of one kind: the bytes that a rank sends and gets."""

    sent: Mapping[int, Tensor]
    """By other rank, the bytes that it gets; several ranks may get the same tensor."""
    wanted: Mapping[int, int]
    """By other rank, the number of bytes that it sends."""
    take: Callable[[slice, Mapping[int, Tensor]], None]
    """Function that processes a piece: a slice of what each rank sends, and, by rank, the bytes of
    the slice, in the memory of the other ranks. It may change what only this rank gets."""
    pieces: tuple[slice, ...]
    """The slices, the same on all ranks."""
    name: str = ""
    """The name in errors, which is given at the launch."""


class SharedSlots:
    """Slots of this rank and of all other ranks, for operations of one kind.

    All ranks make the same operations in the same order, each in one thread. The pieces of all
    operations are numbered, and pass through the slots in turn. Gloo messages announce them.

    Args:
        group: of the ranks.
        tags: of the announcements.
        segments: by rank, the memory of its slots.
    """

    def __init__(
        self, group: dist.ProcessGroup, tags: MessageTags, segments: Sequence[SharedSegment]
    ) -> None:
        self._group, self._tags = group, tags
        self.segments = segments
        memory = [torch.frombuffer(one.memory, dtype=torch.uint8) for one in segments]
        self._slots = [one.tensor_split(SLOTS) for one in memory]
        self._error: BaseException | None = None
        """The first error. No piece is exchanged afterwards."""

    def cut(self, nbytes: int, parts: int = 1) -> tuple[slice, ...]:
        """Return the pieces of parts with at most ``nbytes`` bytes, if a slot has several parts."""
        step = self._slots[0][0].numel() // parts // ALIGNMENT * ALIGNMENT
        return tuple(slice(start, start + step) for start in range(0, nbytes, step))

    def run(self, exchange: PieceExchange) -> None:
        """Send and read all pieces of an operation.

        Raises:
            TransportError: a rank died, did not come, or runs another operation; now or before.
        """
        if self._error is not None:
            raise self._error
        try:
            for piece in exchange.pieces:
                self._pass(exchange, piece)
        except BaseException as error:
            self._error = error
            raise

    def _pass(self, exchange: PieceExchange, piece: slice) -> None:
        """Write a piece of each part, announce it, and read the pieces of all other ranks."""
        number, tag = self._tags.next()
        own, size = self._group.rank(), self._group.size()
        places = self._write(number, exchange, piece)
        words, moves = {}, []
        for rank in (*range(own + 1, size), *range(own)):
            # Each rank begins with another one, so that no rank gets all messages first.
            part = exchange.sent[rank]
            count = part[piece].numel()
            word = torch.tensor([number, places[id(part)], count], device="cpu")
            words[rank] = torch.zeros_like(word)
            moves.append((Direction.TO, rank, word, count))
            moves.append((Direction.FROM, rank, words[rank], count))
        wait_messages(
            exchange.name, self._group, launch_messages(exchange.name, self._group, moves, tag)
        )
        self._read(number, exchange, piece, words)

    def _write(self, number: int, exchange: PieceExchange, piece: slice) -> dict[int, int]:
        """Copy a piece of each part to a slot. Return where each part is in it, by id."""
        slot, room = self._slots[self._group.rank()][number % SLOTS], 0
        places = dict[int, int]()
        for part in exchange.sent.values():
            if id(part) not in places:
                places[id(part)] = room
                found = part[piece]
                slot[room : room + found.numel()].copy_(found)
                room += -(-found.numel() // ALIGNMENT) * ALIGNMENT
        return places

    def _read(
        self, number: int, exchange: PieceExchange, piece: slice, words: Mapping[int, Tensor]
    ) -> None:
        """Process a piece of what the other ranks send, at the places that they have announced."""
        found = {}
        for rank, word in sorted(words.items()):
            expected = len(range(exchange.wanted[rank])[piece])
            other, start, count = word.tolist()
            if (other, count) != (number, expected):
                raise TransportError(
                    f"{exchange.name}: group rank {rank} sends {count} bytes as its piece {other}, "
                    f"where {expected} bytes as piece {number} are expected; all ranks must launch "
                    f"the same operations, in the same order. {ADVICE}"
                )
            if count:
                found[rank] = self._slots[rank][number % SLOTS][start : start + count]
        if found:
            exchange.take(piece, found)


def share_memory(group: dist.ProcessGroup, tags: MessageTags) -> SharedSlots | None:
    """Return slots in memory that all ranks share; None if some rank cannot. Collective.

    Raises:
        TransportError: a rank did not come.
    """
    if group.size() > MOST:
        return None
    nbytes = SHARED_BYTES // group.size() // (SLOTS * ALIGNMENT) * (SLOTS * ALIGNMENT)
    own = _create_segment(nbytes)
    every = [Address(*one) for one in _gather_numbers(group, own.address if own else NOWHERE)]
    opened: list[SharedSegment] = []
    if own is not None and NOWHERE not in every:
        with suppress(OSError):
            for one in every:
                is_own = one == own.address
                opened.append(own if is_own else SharedSegment.attach(one, nbytes))
    if min(_gather_numbers(group, [len(opened)])) != [group.size()]:
        return None
    return SharedSlots(group, tags, opened)


def _create_segment(nbytes: int) -> SharedSegment | None:
    """Return a segment, or None if this rank can have none. Warn if this is not by choice."""
    if os.environ.get(SWITCH) == "0" or not (segment.PROCESSES / "self" / "fd").is_dir():
        return None
    try:
        return SharedSegment.create(nbytes)
    except OSError as error:
        warnings.warn(
            f"{error}; ranks will exchange through the network instead, which takes about twice as "
            f"long: set {SWITCH}=0 where this is as it should be",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _gather_numbers(group: dist.ProcessGroup, numbers: Sequence[int]) -> list[list[int]]:
    """Return the numbers of every rank. Collective: all ranks pass equally many numbers."""
    operation, rank = "finding out whether memory can be shared", group.rank()
    words = [torch.tensor(numbers, device="cpu") for _ in range(group.size())]
    wait_messages(
        operation, group, [launch_broadcast(operation, group, *one, 1) for one in enumerate(words)]
    )
    assert words[rank].tolist() == list(numbers)
    return [word.tolist() for word in words]
