"""Random sequences of chunks through a ring."""

import functools
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from hypothesis import strategies as st

from sharding.transport import atomics
from sharding.transport.ring import RingReader, RingShape, RingWriter
from sharding.transport.segment import SharedSegment


@contextmanager
def as_on(machine: str) -> Iterator[None]:
    """Simulate a processor of another kind."""
    with mock.patch.object(platform, "machine", return_value=machine):
        atomics._functions.cache_clear()
        try:
            yield
        finally:
            atomics._functions.cache_clear()


def hand_on(readers: int, slots: int, data: st.DataObject) -> None:
    """Check that each reader gets all chunks for it, once and in order."""
    shape = RingShape(readers, slots, 64)
    segment = SharedSegment.create(shape.nbytes)
    writer = RingWriter(segment.memory, shape)
    taking = [RingReader(segment.memory, shape, reader) for reader in range(readers)]
    waiting: list[list[int]] = [[] for _ in range(readers)]
    for number in range(data.draw(st.integers(1, 60))):
        reader = data.draw(st.integers(-1, readers - 1))
        if reader >= 0:
            chunk = taking[reader].peek()
            assert (chunk is None) == (not waiting[reader])
            if chunk is not None:
                assert chunk[0] == waiting[reader].pop(0)
                taking[reader].advance()
            continue
        left = functools.reduce(set.union, map(set, waiting), set[int]())
        slot = writer.find_free_slot()
        assert (slot is None) == (len(left) == slots)
        assert writer.slow_readers() == {one for one, numbers in enumerate(waiting) if numbers}
        if slot is not None:
            into = data.draw(st.sets(st.integers(0, readers - 1), min_size=1))
            writer.chunks[slot].fill_(number)
            writer.publish(slot, into)
            for one in into:
                waiting[one].append(number)
