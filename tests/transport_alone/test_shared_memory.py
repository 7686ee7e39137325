"""Tests, in one process, of memory that processes share."""

import os
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sharding.transport.segment import Address, SharedSegment
from sharding.transport.shared_slots import FilledSlot, SharedSlots


def test_a_segment_is_found_by_its_address_and_size() -> None:
    own = SharedSegment.create(5000)
    process, descriptor, token = own.address
    other = SharedSegment.attach(own.address, 5000)
    own.memory[4999] = 7
    assert other.memory[4999] == 7
    with pytest.raises(OSError, match="cannot map 8000 bytes"):
        SharedSegment.attach(own.address, 8000)
    with pytest.raises(OSError, match="and not /memfd:functional-optim-"):
        SharedSegment.attach(own.address._replace(token=token + 1), 5000)
    with (
        Path(os.devnull).open() as file,
        pytest.raises(OSError, match="/dev/null, and not /memfd:"),
    ):
        SharedSegment.attach(Address(process, file.fileno(), token), 5000)
    with pytest.raises(OSError, match="No such file"):
        SharedSegment.attach(Address(process, 10**6, token), 5000)
    for nbytes in (100, 10000):  # a shorter file would end a writer by a signal
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, nbytes)
    del own
    assert other.memory[4999] == 7


def open_segments() -> list[str]:
    """Return the titles of this process's open segments."""
    titles = []
    for file in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor of the folder itself is closed by now
            titles.append(str(file.readlink()))
    return sorted(title for title in titles if "functional-optim-" in title)


def test_where_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, os.strerror(28))

    before = open_segments()
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="cannot make 5000 bytes of shared memory: .*No space left"):
        SharedSegment.create(5000)
    assert open_segments() == before


def test_where_there_are_no_such_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(OSError, match="no anonymous files"):
        SharedSegment.create(5000)


def test_a_slot_is_used_again_only_after_all_ranks_have_read_it() -> None:
    def group(rank: int) -> Any:
        return SimpleNamespace(size=lambda: 3, rank=lambda: rank)

    def write(rank: int) -> FilledSlot:
        part = torch.full((8,), rank, dtype=torch.uint8)
        return slots[rank].write({other: part for other in range(3) if other != rank})

    def read(rank: int, source: int, made: FilledSlot) -> None:
        part = slots[rank].read("test", made.number, source, made.words[rank], 8)
        assert part.tolist() == [source] * 8

    slots = [SharedSlots(group(rank)) for rank in range(3)]
    first = [write(rank) for rank in range(3)]
    for rank in range(3):
        for source in {0, 1, 2} - {rank}:
            read(rank, source, first[source])
        slots[rank].finish(0)
    later = {rank: write(rank) for rank in (1, 2)}
    read(0, 1, later[1])  # rank 1 has read the first slot; rank 2 may still read it
    second = write(0)
    assert second.is_new
    read(0, 2, later[2])
    third = write(0)
    assert not third.is_new and torch.equal(third.words[1][1:4], first[0].words[1][1:4])
