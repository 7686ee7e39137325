"""Tests of memory that ranks share: failures to share it, and leftovers."""

import os
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharding.transport import atomics, ring_channel
from sharding.transport.segment import Address, SharedSegment
from tests.choices import case, examples
from tests.ranks import Job, run_ranks
from tests.transport_alone.hand_on import as_on, hand_on

from . import memory_jobs

REASONS = {"no room": "No space left on device", "no order": "(there is no C++ compiler here)"}


def test_where_one_rank_cannot_all_use_the_network() -> None:
    outcomes = run_ranks({"without": Job(memory_jobs.without)}, ranks=3, seconds=120)["without"]
    for rank, outcome in enumerate(outcomes):
        for how, seen in outcome.result().items():
            with case(how=how, rank=rank):
                assert seen["right"] and seen["operations"] == 0
                # Both kinds of operation warn here; a normal program shows the same warning once.
                assert len(seen["said"]) == (2 if how in REASONS and rank == 1 else 0)
                for said in seen["said"]:
                    assert f"{REASONS[how]}; ranks will exchange through the network" in said


def test_nothing_of_it_has_a_name() -> None:
    """Shared memory has no file names, so killed ranks leave nothing, and /dev/shm is not used."""
    for outcome in run_ranks({"names": Job(memory_jobs.names)}, ranks=3, seconds=120)["names"]:
        assert outcome.result() == [0] * 6


def test_what_a_killed_rank_leaves(tmp_path: Path) -> None:
    """A rank killed before other ranks know its memory leaves no file."""
    file = tmp_path / "mapped"
    job = Job(memory_jobs.killed_before_others_know, {"file": str(file)})
    (outcome,) = run_ranks({"killed": job}, ranks=1, seconds=120, fresh=True)["killed"]
    assert outcome.error is not None and f"exit code {-signal.SIGKILL}" in outcome.error
    (mapped,) = file.read_text().splitlines()
    assert not Path(mapped).exists()
    assert mapped.startswith("/memfd:")


def lives_with_a_child(tell: int, stays: int) -> None:
    """Make a segment and a child process that stays alive; wait to be killed."""
    one = SharedSegment.create(4096)
    if os.fork() == 0:
        os.read(stays, 1)
        os._exit(0)
    os.write(tell, " ".join(map(str, one.address)).encode())
    signal.pause()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # from Python 3.12 on
def test_what_a_fork_inherits_does_not_count_as_the_rank() -> None:
    """The child of a fork outlives a rank, and must not keep the lock of that rank."""
    (told, tell), (stays, go) = os.pipe(), os.pipe()  # the reader waits until go is closed
    rank = os.fork()
    if rank == 0:
        try:
            os.close(go)
            lives_with_a_child(tell, stays)
        finally:
            os._exit(1)
    os.close(tell)
    try:
        address = Address(*map(int, os.read(told, 100).split()))
        seen = SharedSegment.attach(address, 4096)
        assert seen.has_owner
        os.kill(rank, signal.SIGKILL)
        os.waitpid(rank, 0)
        assert not seen.has_owner
    finally:
        for end in (told, stays, go):
            os.close(end)


# ------------------------------------- processors that may reorder writes


def test_where_the_processor_keeps_no_order_two_functions_do() -> None:
    """ARM and POWER may reorder writes, so two compiled functions order them."""
    outcomes = run_ranks({"weak order": Job(memory_jobs.weak_order)}, ranks=3, seconds=120)
    for outcome in outcomes["weak order"]:
        assert outcome.result() == {"right": True, "operations": 2, "said": [], "functions": True}


@examples(10)
@given(st.integers(1, 4), st.integers(1, 6), st.data())
def test_a_ring_hands_on_everything_once_and_in_order(
    readers: int, slots: int, data: st.DataObject
) -> None:
    with as_on("aarch64"):
        assert atomics._functions() is not None and not atomics.unsupported_reason()
        hand_on(readers, slots, data)


def test_without_a_compiler_there_is_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no_such_compiler")
    with as_on("aarch64"):
        assert "this processor (aarch64) may mix the order" in atomics.unsupported_reason()
        with pytest.warns(RuntimeWarning, match="there is no C\\+\\+ compiler here"):
            assert ring_channel._create_segment(4096) is None
