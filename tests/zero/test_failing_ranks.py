"""Tests of a rank that fails or dies in a collective: the others end, and name it and its error.

No time is measured: a rank that waits for the group's timeout counts as a hang, and has no result.
"""

import errno
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from sharding import ZeroRedundancyOptimizer
from sharding.transport.local import LocalWorld
from sharding.transport.local_group import LocalGroup
from sharding.zero import full_state_dict, optimizer
from tests.ranks import Job, Outcomes, run_at_once, run_ranks
from tests.zero_local.saved import same

from . import dying
from .towers import Halving, give, raised, tower

ERRORS: dict[str, tuple[Callable[[], BaseException], str]] = {
    "full disk": (
        lambda: OSError(errno.ENOSPC, "No space left on device"),
        "OSError: [Errno 28] No space left on device",
    ),
    "CheckpointException": (
        lambda: CheckpointException("write", {}),
        "CheckpointException: CheckpointException ranks",
    ),
    "KeyboardInterrupt": (KeyboardInterrupt, "KeyboardInterrupt: "),
    "SystemExit": (lambda: SystemExit("enough"), "SystemExit: enough"),
}


@contextmanager
def failing(place: Any, name: str, ranks: list[int], error: Callable[[], Any]) -> Iterator[None]:
    """Let a function raise an error on some ranks, which are threads."""
    function = getattr(place, name)

    def maybe(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread().name in {f"rank {rank}" for rank in ranks}:
            raise error()
        return function(*arguments, **options)

    with mock.patch.object(place, name, maybe):
        yield


def stepped(group: LocalGroup, steps: int) -> ZeroRedundancyOptimizer:
    _, zero = tower("adamw", group, "elements")
    for step in range(steps):
        give(zero, step)
        zero.step()
    return zero


@pytest.mark.parametrize("what", ERRORS)
def test_a_rank_that_fails_is_named_with_its_error(what: str) -> None:
    """The failing rank raises its own error, and the other ranks name that rank and the error."""
    error, told = ERRORS[what]
    world = LocalWorld(3)
    zeros = world.run(lambda group: stepped(group, 1))

    def each() -> list[str]:
        return world.run(lambda group: raised(zeros[group.rank()].consolidate_state_dict))

    assert each() == ["nothing"] * 3
    kept = zeros[0].state_dict()
    with failing(full_state_dict, "local_content", [1], error):
        for rank, text in enumerate(each()):
            there = "RuntimeError: group rank 1 (global rank 1) could not collect its state: "
            assert text.startswith(told if rank == 1 else there + told)
    # If several ranks fail, the error names the first one with its error.
    with failing(full_state_dict, "local_content", [0, 2], error):
        own, other, again = each()
    assert own == again and own.startswith(told)
    assert other.startswith("RuntimeError: group rank 0 (global rank 0) could not collect its ")
    assert other.endswith("(group rank 2 (global rank 2) failed as well)")
    assert each() == ["nothing"] * 3
    assert same(zeros[0].state_dict(), kept)


def test_an_interrupt_while_a_plan_is_made() -> None:
    """An interrupted rank raises KeyboardInterrupt, and the other ranks name that rank."""
    with failing(optimizer, "build_plan", [1], KeyboardInterrupt):
        first, own, last = LocalWorld(3).run(lambda group: raised(tower, "adamw", group))
    assert own == "KeyboardInterrupt: "
    assert first == last
    told = "RuntimeError: group rank 1 (global rank 1) could not make a plan: KeyboardInterrupt"
    assert first.startswith(told)


def test_state_that_cannot_travel_is_an_error_on_all_ranks() -> None:
    """Differing targets, or state of an unsupported type, are an error on all ranks."""

    def collects(group: LocalGroup) -> None:
        params = [torch.nn.Parameter(torch.ones(3)) for _ in range(3)]
        zero = ZeroRedundancyOptimizer(params, Halving, group)
        for param in params:
            param.grad = torch.ones(3)
        zero.step()
        rank = group.rank()
        told = raised(zero.consolidate_state_dict, to=rank % 2)
        assert told.startswith("ValueError: to must be the same on all ranks, got [0, 1, 0]")
        if rank == 1:
            next(iter(zero.optim.state.values()))["odd"] = object()
        told = raised(zero.consolidate_state_dict)
        if rank == 1:
            assert told.startswith("TypeError: state that is consolidated must be of ")
        else:
            assert "group rank 1 (global rank 1) could not collect its state" in told

    LocalWorld(3).run(collects)


SHORT = 4.0
"""Timeout of a group in seconds for a rank that does not come."""
DEATHS = ("collect", "sending")


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    """Run each death; the ranks of the next job are new processes."""
    jobs = {what: Job(dying.dies_in, {"what": what}, dying.FAR) for what in DEATHS}
    return run_ranks(jobs, ranks=3, seconds=120, fresh=True)


@pytest.mark.parametrize("what", DEATHS)
def test_a_rank_that_dies_is_named(outcomes: Outcomes, what: str) -> None:
    """All other ranks name the dead rank, and no living one."""
    assert outcomes[what][dying.DYING].error is not None
    for rank in (0, 2):
        error = outcomes[what][rank].result()
        assert error.startswith("TransportError: ")
        assert "lost group rank 1 (global rank 1) while" in error


@pytest.fixture(scope="module")
def lost() -> Outcomes:
    """Run each sum with a dead rank, and with one that does not come before a short timeout."""
    absent, dead = (
        {
            f"{what}, {way}": Job(dying.lost_in, {"what": what, "dies": way == "dead"}, seconds)
            for what in dying.SUMS
        }
        for way, seconds in (("absent", SHORT), ("dead", dying.FAR))
    )
    return {
        **run_at_once(absent, ranks=3, seconds=120),
        **run_ranks(dead, ranks=3, seconds=120, fresh=True),
    }


@pytest.mark.parametrize("way", ["dead", "absent"])
@pytest.mark.parametrize("what", dying.SUMS)
def test_a_rank_that_is_missing_in_a_sum_is_named(lost: Outcomes, what: str, way: str) -> None:
    """The bare all-reduce of torch ended in an error without a rank, after the whole timeout."""
    for rank in (0, 2):
        error = lost[f"{what}, {way}"][rank].result()
        assert error.startswith("TransportError: "), error
        named = set(re.findall(r"group rank (\d)", error.partition("of 3 ranks")[2]))
        assert named == {str(dying.DYING)}, error
