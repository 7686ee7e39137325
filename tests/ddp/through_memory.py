"""Ranks that exchange all data through shared memory, however small the data is."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from sharding.transport import shared_memory, shared_slots

SHARED_BYTES = 6144
"""Bytes of all slots, so few that operations of tests have many pieces."""


class Seen:
    """Count of the operations that went through memory."""

    def __init__(self) -> None:
        self.operations = 0


@contextmanager
def through_memory() -> Iterator[Seen]:
    """Make new transports use memory for everything; all ranks must open this together."""
    seen = Seen()
    run = shared_slots.SharedSlots.run

    def counted(self: shared_slots.SharedSlots, *args: Any) -> None:
        seen.operations += 1
        run(self, *args)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(shared_memory, "SMALLEST", 1))
        stack.enter_context(mock.patch.object(shared_slots, "SHARED_BYTES", SHARED_BYTES))
        stack.enter_context(mock.patch.object(shared_slots.SharedSlots, "run", counted))
        yield seen
