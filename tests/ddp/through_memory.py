"""Ranks that exchange all data through shared memory, however small the data is."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from sharding.transport import ring_channel, shared_memory

CHUNK = 256
"""Bytes in a chunk, so few that tests need many chunks and several rounds of the ring."""
RING = 4 * CHUNK


class Seen:
    """Count of the operations that went through memory."""

    def __init__(self) -> None:
        self.operations = 0


@contextmanager
def through_memory() -> Iterator[Seen]:
    """Make new transports use memory for everything; all ranks must open this together."""
    seen = Seen()
    finish = ring_channel.RingChannel.finish

    def counted(self: ring_channel.RingChannel, *arguments: Any) -> None:
        seen.operations += 1
        finish(self, *arguments)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(shared_memory, "SMALLEST", 1))
        stack.enter_context(mock.patch.object(ring_channel, "RING", RING))
        stack.enter_context(mock.patch.object(ring_channel, "LARGEST_CHUNK", CHUNK))
        stack.enter_context(mock.patch.object(ring_channel, "SMALLEST_CHUNK", CHUNK))
        stack.enter_context(mock.patch.object(ring_channel.RingChannel, "finish", counted))
        yield seen
