"""Through shared memory: the bits of the network, in chunks that go around a ring many times."""

import ast
import functools
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding.transport import lane, ordered
from sharding.transport.ring import RingReader, RingWriter, Shape
from sharding.transport.segment import Address, Segment
from tests.ranks import Job, Outcomes, run_ranks

from . import jobs, memory_jobs
from .test_processes import CASES, NAMES

WITHOUT = ("no room", "no order", "switched off", "elsewhere", "another host")
REASONS = {"no room": "No space left on device", "no order": "(there is no C++ compiler here)"}
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
            "names": Job(memory_jobs.names),
            "weak order": Job(memory_jobs.weak_order),
            **{how: Job(memory_jobs.without, {"how": how}) for how in WITHOUT},
            **more,
        },
        ranks=ranks,
        seconds=60,
    )


@pytest.fixture(scope="module", params=[2, 3, 4])
def outcomes(request: pytest.FixtureRequest) -> Outcomes:
    ranks: int = request.param
    return launch(ranks)


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
        assert len(seen["said"]) == (2 if how in REASONS and rank == 1 else 0)
        for said in seen["said"]:
            assert f"{REASONS[how]}; ranks will exchange through the network" in said


def test_nothing_of_it_has_a_name(outcomes: Outcomes) -> None:
    """So nothing stays behind, whoever is killed, and none of /dev/shm is used (faults 13, 25)."""
    for outcome in outcomes["names"]:
        seen = outcome.result()
        assert len(seen) == 2 * len(outcomes["names"])
        assert set(seen) == {0}


def test_where_the_processor_keeps_no_order_two_functions_do(outcomes: Outcomes) -> None:
    """As on ARM and POWER (fault 25)."""
    for outcome in outcomes["weak order"]:
        assert outcome.result() == {"right": True, "operations": 2, "said": [], "functions": True}


def test_what_a_fork_inherits_does_not_count_as_the_rank(outcomes: Outcomes) -> None:
    if "forked" in outcomes:
        assert [outcome.result() for outcome in outcomes["forked"]] == [[True, False]] * 2


# --------------------------------------------------------------------------------- what goes wrong


@pytest.fixture(scope="module")
def failures() -> Outcomes:
    found = run_ranks({"out of step": Job(memory_jobs.out_of_step)}, ranks=2, seconds=60)
    for dies in (True, False):
        for operation in OPERATIONS:
            job = Job(memory_jobs.stopped, {"victim": 1, "operation": operation, "dies": dies})
            name = f"{operation} {dies}"
            found |= run_ranks({name: job}, ranks=3, seconds=60, fresh=True)
    found |= run_ranks({"never": Job(memory_jobs.never_came)}, ranks=3, seconds=60)
    found |= run_ranks({"early": Job(memory_jobs.ends_early)}, ranks=3, seconds=60)
    return found


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
        assert seen == {} if rank == 1 else "group rank 1 (global rank 1) to send" in seen["error"]


def test_a_rank_may_end_when_it_has_done_its_part(failures: Outcomes) -> None:
    assert [failures["early"][rank].result() for rank in (1, 2)] == [True, True]


def test_ranks_that_are_out_of_step(failures: Outcomes) -> None:
    said = [outcome.result() for outcome in failures["out of step"]]
    assert "group rank 1 sends 59 elements, where 60 are expected" in said[0]
    assert "group rank 0 sends 40 elements, where 41 are expected" in said[1]


# ------------------------------------------------------------------------------ in one process


@settings(derandomize=True, max_examples=100)
@given(st.integers(1, 4), st.integers(1, 6), st.data())
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_ring_hands_on_everything_once_and_in_order(
    machine: str, readers: int, slots: int, data: st.DataObject
) -> None:
    with as_on(machine):
        hand_on(readers, slots, data)


@contextmanager
def as_on(machine: str) -> Iterator[None]:
    """On a processor of another kind."""
    with mock.patch.object(platform, "machine", return_value=machine):
        ordered._functions.cache_clear()
        try:
            yield
        finally:
            ordered._functions.cache_clear()


def hand_on(readers: int, slots: int, data: st.DataObject) -> None:
    shape = Shape(readers, slots, 64)
    segment = Segment.make(shape.nbytes)
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


def test_a_segment_is_found_by_its_address_and_size() -> None:
    own = Segment.make(5000)
    process, descriptor, token = own.address
    other = Segment.find(own.address, 5000)
    own.memory[4999] = 7
    assert other.memory[4999] == 7 and other.has_owner
    with pytest.raises(OSError, match="cannot map 8000 bytes"):
        Segment.find(own.address, 8000)
    with pytest.raises(OSError, match="and not /memfd:functional-optim-"):
        Segment.find(own.address._replace(token=token + 1), 5000)
    with (
        Path(os.devnull).open() as file,
        pytest.raises(OSError, match="/dev/null, and not /memfd:"),
    ):
        Segment.find(Address(process, file.fileno(), token), 5000)
    with pytest.raises(OSError, match="No such file"):
        Segment.find(Address(process, 10**6, token), 5000)
    for nbytes in (100, 10000):  # shorter, and who writes to it would be ended by a signal
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, nbytes)
    del own
    assert not other.has_owner
    assert other.memory[4999] == 7


@pytest.mark.parametrize("how", ["no room", "no such files"])
def test_where_there_is_none(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, os.strerror(28))

    before = len(list(Path("/proc/self/fd").iterdir()))
    if how == "no room":
        monkeypatch.setattr(os, "posix_fallocate", full)
        said = "cannot make 5000 bytes of shared memory: .*No space left"
    else:
        monkeypatch.delattr(os, "memfd_create")
        said = "no anonymous files"
    with pytest.raises(OSError, match=said):
        Segment.make(5000)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


KILLED = """
import os, signal
import torch.distributed as dist
from sharding.transport import lane

def killed(*arguments):
    with open("/proc/self/maps") as maps:
        print([line.split(maxsplit=5)[5].strip() for line in maps if "functional-optim-" in line])
    os.sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)

lane._told = killed
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
lane.made_together(dist.group.WORLD)
"""


def test_what_a_killed_rank_leaves() -> None:
    """Between making its memory and telling the others, where nobody else knows it (fault 13)."""
    made = subprocess.run(
        [sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True, timeout=100, check=False
    )
    assert made.returncode == -signal.SIGKILL
    mapped = ast.literal_eval(made.stdout)
    assert len(mapped) == 1
    assert not Path(mapped[0]).exists()
    assert mapped[0].startswith("/memfd:")


def test_what_keeps_the_order_is_compiled_where_the_processor_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """(fault 25)"""
    with as_on("x86_64"):
        assert ordered._functions() is None and not ordered.why_not()
    with as_on("aarch64"):
        assert ordered._functions() is not None and not ordered.why_not()
    monkeypatch.setenv("CXX", "no_such_compiler")
    with as_on("aarch64"):
        assert "this processor (aarch64) may mix the order" in ordered.why_not()
        with pytest.warns(RuntimeWarning, match="there is no C\\+\\+ compiler here"):
            assert lane._own(4096) is None
