"""Slots: the memory in which a rank leaves its parts, and from which it reads those of others."""

import os
import threading
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from sharding.transport import segment
from sharding.transport.groups import GroupRank, format_ranks
from sharding.transport.messages import ADVICE, launch_broadcast, wait_messages
from sharding.transport.protocol import TransportError
from sharding.transport.segment import NOWHERE, Address, SharedSegment

SWITCH = "FUNCTIONAL_OPTIM_SHARED_MEMORY"
"""Environment variable. If it is 0 on any rank, all ranks use the network."""
MOST = 512
"""The largest number of ranks of a group that share memory."""
ALIGNMENT = 64
SMALLEST_SLOT = 1 << 20
KEPT = 16
"""Number of segments of another rank that stay mapped."""


class FilledSlot(NamedTuple):
    """Parts in a slot."""

    number: int
    """Of the operation."""
    words: dict[int, Tensor]
    """The announcement to each rank. It begins with 1 if the slot is new."""
    is_new: bool
    """True if the other ranks have not seen the slot before."""


class SharedSlots:
    """Memory of this rank for operations of one kind, and the memory of the other ranks.

    Every rank announces its parts to every other rank, with the number of its first operation that
    is not finished. So a rank knows when all others have read a slot, and then uses it again. It
    has one or two slots more than operations in flight.

    Args:
        group: of the ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._lock = threading.Lock()
        self._free: list[SharedSegment] = []
        self._used: dict[int, SharedSegment] = {}
        """By the number of the operation."""
        self._count = 0
        others = [rank for rank in range(group.size()) if rank != group.rank()]
        self._known = dict.fromkeys(others, 0)
        """By rank, its first operation that was not finished when it was last heard of."""
        self._first = 0
        """This rank's first operation that is not finished."""
        self._mapped: dict[int, OrderedDict[Address, SharedSegment]] = {}

    def write(self, parts: Mapping[int, Tensor]) -> FilledSlot:
        """Copy parts, which are bytes by rank, to a free slot; the same part once."""
        places, size = dict[int, int](), 0
        for part in parts.values():
            if id(part) not in places:
                places[id(part)] = size
                size += -(-part.numel() // ALIGNMENT) * ALIGNMENT
        with self._lock:
            number, first = self._count, self._first
            self._count += 1
            free = self._free_slot(size)
            slot = self._used[number] = free or self._new_slot(size)
        memory = torch.frombuffer(slot.memory, dtype=torch.uint8)
        for part in {id(one): one for one in parts.values()}.values():
            at = places[id(part)]
            memory[at : at + part.numel()].copy_(part)
        own = [free is None, *slot.address, len(slot.memory), number, first]
        words = {
            rank: torch.tensor([*own, places[id(part)], part.numel()], device="cpu")
            for rank, part in parts.items()
        }
        return FilledSlot(number, words, free is None)

    def _free_slot(self, nbytes: int) -> SharedSegment | None:
        """Return the smallest slot that is free and large enough, or None."""
        read = min(self._known.values())
        for number in [one for one in self._used if one < read]:
            self._free.append(self._used.pop(number))
        fitting = [one for one in self._free if len(one.memory) >= nbytes]
        if not fitting:
            return None
        found = min(fitting, key=_size)
        self._free.remove(found)
        return found

    def _new_slot(self, nbytes: int) -> SharedSegment:
        """Return a new slot, which replaces the largest free one."""
        if self._free:
            self._free.remove(max(self._free, key=_size))
        try:
            return SharedSegment.create(max(nbytes, SMALLEST_SLOT))
        except OSError as error:
            raise TransportError(
                f"{error}; free some memory, or set {SWITCH}=0 on any rank, and all ranks use the "
                f"network. {ADVICE}"
            ) from error

    def read(self, operation: str, number: int, rank: int, word: Tensor, nbytes: int) -> Tensor:
        """Return the part that another rank has announced, in its memory.

        Raises:
            TransportError: the announcement is of another operation, or the rank is gone.
        """
        _, process, descriptor, token, size, other, first, at, found = word.tolist()
        if (other, found) != (number, nbytes):
            raise TransportError(
                f"{operation}: group rank {rank} sends {found} bytes, where {nbytes} are expected; "
                "all ranks must launch the same operations, in the same order"
            )
        with self._lock:
            self._known[rank] = first
            mapped = self._mapped.setdefault(rank, OrderedDict())
            address = Address(process, descriptor, token)
            if address not in mapped:
                mapped[address] = self._attach(operation, rank, address, size)
            mapped.move_to_end(address)
            while len(mapped) > KEPT:
                mapped.popitem(last=False)
            memory = mapped[address].memory
        return torch.frombuffer(memory, dtype=torch.uint8)[at : at + nbytes]

    def _attach(self, operation: str, rank: int, address: Address, nbytes: int) -> SharedSegment:
        try:
            return SharedSegment.attach(address, nbytes)
        except OSError as error:
            raise TransportError(
                f"{operation}: {format_ranks(self._group, [GroupRank(rank)])} has announced shared "
                f"memory that cannot be opened ({error}): it died, or ended after an error of its "
                f"own. {ADVICE}"
            ) from error

    def finish(self, number: int) -> None:
        """Record that this rank has read all parts of an operation. They finish in their order."""
        with self._lock:
            self._first = number + 1


def _size(slot: SharedSegment) -> int:
    return len(slot.memory)


def can_share(group: dist.ProcessGroup) -> bool:
    """Return True if all ranks of a group can share memory. Collective.

    Raises:
        TransportError: a rank did not come.
    """
    if group.size() > MOST:
        return False
    own = _create_segment()
    every = [Address(*one) for one in _gather_numbers(group, own.address if own else NOWHERE)]
    opened = 0
    if own is not None and NOWHERE not in every:
        with suppress(OSError):
            others = [one for one in every if one != own.address]
            opened = len([SharedSegment.attach(one, SMALLEST_SLOT) for one in others]) + 1
    return min(_gather_numbers(group, [opened])) == [group.size()]


def _create_segment() -> SharedSegment | None:
    """Return a segment, or None if this rank can have none. Warn if this is not by choice."""
    if os.environ.get(SWITCH) == "0" or not (segment.PROCESSES / "self" / "fd").is_dir():
        return None
    try:
        return SharedSegment.create(SMALLEST_SLOT)
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
