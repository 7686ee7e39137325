"""Ranks that exchange all data through shared memory, however small the data is."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from sharding.transport import shared_memory, shared_slots

SLOT = 256
"""Bytes of the smallest slot, so few that tests need larger slots after the first ones."""


class Seen:
    """Count of the operations that went through memory."""

    def __init__(self) -> None:
        self.operations = 0


@contextmanager
def through_memory() -> Iterator[Seen]:
    """Make new transports use memory for everything; all ranks must open this together."""
    seen = Seen()
    finish = shared_slots.SharedSlots.finish

    def counted(self: shared_slots.SharedSlots, number: int) -> None:
        seen.operations += 1
        finish(self, number)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(shared_memory, "SMALLEST", 1))
        stack.enter_context(mock.patch.object(shared_slots, "SMALLEST_SLOT", SLOT))
        stack.enter_context(mock.patch.object(shared_slots.SharedSlots, "finish", counted))
        yield seen
