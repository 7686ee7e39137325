"""Tests, in one process, of memory that processes share."""

import os
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sharding.transport.segment import Address, SharedSegment
from sharding.transport.shared_slots import ALIGNMENT, SLOTS, SharedSlots


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


@pytest.mark.parametrize(("nbytes", "parts"), [(0, 1), (1, 3), (300, 1), (5000, 1), (5000, 5)])
def test_pieces_fill_a_slot_at_most(nbytes: int, parts: int) -> None:
    segment = SharedSegment.create(SLOTS * 512)
    slots = SharedSlots(SimpleNamespace(), SimpleNamespace(), [segment])  # type: ignore[arg-type]
    pieces = slots.cut(nbytes, parts)
    assert [at for piece in pieces for at in range(nbytes)[piece]] == list(range(nbytes))
    for piece in pieces:
        assert piece.start % ALIGNMENT == 0 and parts * (piece.stop - piece.start) <= 512
