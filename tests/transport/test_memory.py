"""Through shared memory: the bits of the network, in chunks that go around a ring many times."""

import functools
import os
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding.transport.ring import RingReader, RingWriter, Shape
from sharding.transport.segment import DIRECTORY, Segment, new_name

from . import jobs, memory_jobs
from .harness import Job, Launched, Outcomes, run_ranks
from .test_processes import CASES, NAMES

WITHOUT = ("no room", "switched off", "elsewhere", "another host")
OPERATIONS = ("reduce_scatter", "all_gather")


def again(function: Any, **arguments: Any) -> Job:
    return Job(memory_jobs.again, {"name": function.__name__, "arguments": arguments})


def launch(ranks: int) -> Outcomes:
    more = {
        2: {"beside ddp": again(jobs.beside_ddp), "forked": Job(memory_jobs.forked)},
        3: {},
        4: {"subgroup": again(jobs.subgroup, ranks=[1, 3]), "mesh": again(jobs.mesh)},
    }[ranks]
    return run_ranks(
        {
            **{
                name: again(jobs.sums, dtype=dtype, cut=cut, average=average)
                for name, (dtype, cut, average) in zip(NAMES, CASES, strict=True)
            },
            "layouts": again(jobs.layouts),
            "other dtypes": again(jobs.other_dtypes),
            "left over": Job(memory_jobs.left_over),
            **{how: Job(memory_jobs.without, {"how": how}) for how in WITHOUT},
            **more,
        },
        ranks=ranks,
        seconds=60,
    )


@pytest.fixture(scope="module", params=[2, 3, 4])
def outcomes(request: pytest.FixtureRequest, launched: Launched) -> Outcomes:
    ranks: int = request.param
    return launched(f"memory{ranks}", lambda: launch(ranks))


@pytest.mark.parametrize("name", NAMES)
def test_sums_are_those_of_one_process(outcomes: Outcomes, name: str) -> None:
    for outcome in outcomes[name]:
        seen = outcome.result()
        assert set(seen["found"].values()) == {True}, seen
        assert seen["operations"] == 2


@pytest.mark.parametrize("name", ["layouts", "other dtypes"])
def test_on_every_rank(outcomes: Outcomes, name: str) -> None:
    """Buckets of any size, waited for in any order; gathers of any dtype."""
    for outcome in outcomes[name]:
        seen = outcome.result()
        assert seen["found"] is True and seen["operations"] >= 5


def test_mean_is_that_of_ddp(outcomes: Outcomes) -> None:
    if "beside ddp" in outcomes:
        assert [outcome.result()["found"] for outcome in outcomes["beside ddp"]] == [True, True]


def test_group_ranks_are_not_global_ranks(outcomes: Outcomes) -> None:
    if "subgroup" in outcomes:
        seen = [outcome.result() for outcome in outcomes["subgroup"]]
        assert seen[0]["found"] is None and seen[2]["found"] is None
        for rank, one in enumerate((seen[1], seen[3])):
            assert one["operations"] == 2
            assert one["found"]["own"] and one["found"]["gathered"]
            assert one["found"]["rank"] == rank


def test_a_mesh(outcomes: Outcomes) -> None:
    if "mesh" in outcomes:
        assert all(outcome.result()["found"] for outcome in outcomes["mesh"])


@pytest.mark.parametrize("how", WITHOUT)
def test_where_one_rank_cannot_all_use_the_network(outcomes: Outcomes, how: str) -> None:
    for rank, outcome in enumerate(outcomes[how]):
        seen = outcome.result()
        assert seen["right"] and seen["operations"] == 0
        # Both kinds of operation ask; in a program the same warning is shown once.
        assert len(seen["said"]) == (2 if how == "no room" and rank == 1 else 0)
        for said in seen["said"]:
            assert "No space left on device; ranks will exchange through the network" in said


def test_no_name_stays_behind(outcomes: Outcomes) -> None:
    assert [outcome.result() for outcome in outcomes["left over"]] == [[]] * len(
        outcomes["left over"]
    )


def test_what_a_fork_inherits_does_not_count_as_the_rank(outcomes: Outcomes) -> None:
    if "forked" in outcomes:
        assert [outcome.result() for outcome in outcomes["forked"]] == [[True, False]] * 2


# --------------------------------------------------------------------------------- what goes wrong


@pytest.fixture(scope="module")
def failures(launched: Launched) -> Outcomes:
    def launch() -> Outcomes:
        found: Outcomes = run_ranks(
            {"out of step": Job(memory_jobs.out_of_step)}, ranks=2, seconds=60
        )
        for dies in (True, False):
            for operation in OPERATIONS:
                # A launch of its own: the process that dies takes the others' next jobs with it.
                arguments = {"victim": 1, "operation": operation, "dies": dies}
                job = Job(memory_jobs.stopped, arguments)
                found |= run_ranks({f"{operation} {dies}": job}, ranks=3, seconds=60)
        found |= run_ranks({"never": Job(memory_jobs.never_came)}, ranks=3, seconds=60)
        found |= run_ranks({"early": Job(memory_jobs.ends_early)}, ranks=3, seconds=60)
        return found

    return launched("memory failures", launch)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_rank_that_dies_on_the_way_is_named(failures: Outcomes, operation: str) -> None:
    for rank in (0, 2):
        seen = failures[f"{operation} True"][rank].result()
        assert (
            f"{operation} 1: group rank {rank} (global rank {rank}) of 3 ranks lost "
            in seen["error"]
        )
        assert "group rank 1 (global rank 1)" in seen["error"].split(" ranks lost ")[1]
        assert "it died" in seen["error"] and "go on from the last checkpoint" in seen["error"]
        assert seen["seconds"] < 10.0  # not the group's 20


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_rank_that_does_not_go_on_is_named(failures: Outcomes, operation: str) -> None:
    for rank in (0, 2):
        seen = failures[f"{operation} False"][rank].result()
        assert f"group rank {rank} (global rank {rank}) of 3 ranks waited 3." in seen["error"]
        # And the third one, perhaps: it cannot go on either, as rank 1 takes nothing of it.
        assert "group rank 1 (global rank 1) to send" in seen["error"].split("ranks waited")[1]
        assert "timeout of 0:00:03" in seen["error"]


def test_a_rank_that_never_comes_is_named(failures: Outcomes) -> None:
    for rank in (0, 1, 2):
        seen = failures["never"][rank].result()
        assert seen["made"] == (rank != 1) and seen["left"] == []
        assert rank == 1 or "group rank 1 (global rank 1) to send" in seen["error"]


def test_a_rank_may_end_when_it_has_done_its_part(failures: Outcomes) -> None:
    assert [failures["early"][rank].result() for rank in (1, 2)] == [True, True]


def test_ranks_that_are_out_of_step(failures: Outcomes) -> None:
    said = [outcome.result() for outcome in failures["out of step"]]
    assert "group rank 1 sends 59 elements, where 60 are expected" in said[0]
    assert "group rank 0 sends 40 elements, where 41 are expected" in said[1]


# ------------------------------------------------------------------------------ in one process


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.integers(1, 4), st.integers(1, 6), st.data())
def test_a_ring_hands_on_everything_once_and_in_order(
    readers: int, slots: int, data: st.DataObject
) -> None:
    shape = Shape(readers, slots, 64)
    segment = Segment(new_name(), shape.nbytes, owner=True)
    segment.unlink()
    writer = RingWriter(segment.memory, shape)
    taking = [RingReader(segment.memory, shape, reader) for reader in range(readers)]
    waiting: list[list[int]] = [[] for _ in range(readers)]
    for number in range(data.draw(st.integers(1, 60))):
        reader = data.draw(st.integers(-1, readers - 1))
        if reader >= 0:
            chunk = taking[reader].next()
            assert (chunk is None) == (not waiting[reader])
            if chunk is not None:
                assert chunk[0] == waiting[reader].pop(0)
                taking[reader].take()
            continue
        left = functools.reduce(set.union, map(set, waiting), set[int]())
        slot = writer.free()
        assert (slot is None) == (len(left) == slots)
        assert writer.slow() == {one for one, numbers in enumerate(waiting) if numbers}
        if slot is not None:
            into = data.draw(st.sets(st.integers(0, readers - 1), min_size=1))
            writer.chunks[slot].fill_(number)
            writer.publish(slot, into)
            for one in into:
                waiting[one].append(number)


def test_a_segment_is_found_by_its_name_and_size() -> None:
    name = new_name()
    own = Segment(name, 5000, owner=True)
    other = Segment(name, 5000, owner=False)
    own.memory[4999] = 7
    assert other.memory[4999] == 7 and other.has_owner
    with pytest.raises(OSError, match="cannot map 8000 bytes"):
        Segment(name, 8000, owner=False)
    with pytest.raises(OSError, match="File exists"):
        Segment(name, 5000, owner=True)  # never one that is there
    own.unlink()
    with pytest.raises(OSError, match="No such file"):
        Segment(name, 5000, owner=False)
    assert (DIRECTORY / f"functional-optim-{name:016x}").exists() is False


def test_no_room_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    name = new_name()

    def full(*_: Any) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="cannot map 5000 bytes of shared memory: .*No space left"):
        Segment(name, 5000, owner=True)
    assert (DIRECTORY / f"functional-optim-{name:016x}").exists() is False
