"""Tests that tensors given to gloo live as long as its threads hold them."""

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from functional_optim._torch.distributed import use_count
from hooks import communication
from hooks.communication import keep_alive


@pytest.fixture
def work(world_of_one: None, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a collective that holds its tensor, as a thread of gloo does."""
    monkeypatch.setattr(communication, "_SENT", [])
    tensor = torch.ones(2)
    launched: Any = dist.all_reduce(tensor, async_op=True)
    launched.wait()
    keep_alive(tensor)
    return [launched]


def settle() -> None:
    """Wait until gloo's threads release the tensor that the test dropped."""
    until = time.monotonic() + 60
    while use_count(communication._SENT[0]) > 1 and time.monotonic() < until:
        time.sleep(0.001)


def test_a_tensor_is_held_until_nobody_else_does(work: list[Any]) -> None:
    given = communication._SENT
    for count in (2, 2, 2):
        keep_alive(torch.ones(1))  # nothing else holds this tensor, so the next call drops it
        assert len(given) == count
    work.clear()
    settle()
    keep_alive(torch.ones(1))
    assert len(given) == 1 and given[0].shape == (1,)


def test_a_program_that_ends_waits_for_the_threads_of_gloo(work: list[Any]) -> None:
    timer = threading.Timer(0.3, work.clear)
    timer.start()
    communication._wait_for_gloo()
    assert use_count(communication._SENT[0]) == 1
    timer.join()


def test_it_does_not_wait_for_ever(work: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communication, "TIMEOUT", 0.2)
    before = time.monotonic()
    communication._wait_for_gloo()
    assert work and 0.2 <= time.monotonic() - before < 60
