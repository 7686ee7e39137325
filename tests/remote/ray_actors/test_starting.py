"""Actors that start late, too late, or never: starts have a separate time limit."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray
import torch

from functional_optim import DistributedOptimizer, sgd
from functional_optim.remote import RayTransport, WorkerError, ray_actor
from functional_optim.remote.ray_actor import Actor
from tests.choices import case

from ..support import LIMIT, SHAPES, parameters
from ..transports import Shelf


class Held(Actor):
    """Actor that starts or dies, as the pipe with its name says."""

    def __init__(self, worker: str) -> None:
        if Path(worker).read_text("utf-8") == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        super().__init__(worker)


@pytest.fixture
def pipe(cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of a pipe that the worker of this name reads before it starts."""
    monkeypatch.setattr(ray_actor, "Actor", Held)
    os.mkfifo(tmp_path / "ps0")
    return tmp_path / "ps0"


def test_a_start_may_take_longer_than_a_call(pipe: Path) -> None:
    """A worker can take longer to start than a call can last, without an error."""
    transport = RayTransport(timeout=0.5)
    placed = transport.place(str(pipe), Shelf, torch.ones(2))
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(placed.result)
        with pytest.raises(TimeoutError):  # the time-out of this caller, not of the worker
            placed.result(1.0)
        pipe.write_text("start", "utf-8")
        assert waits.result(LIMIT).worker == str(pipe)
    transport.close()


def test_one_that_does_not_start_in_time_is_named_and_ended(pipe: Path) -> None:
    """The first worker never gets its start signal; no machine of the cluster fits the second."""
    far = {"far": {"resources": {"nowhere": 1.0}}}
    for worker in (str(pipe), "far"):
        with case(worker=worker):
            transport = RayTransport(start_timeout=0.1, options=far)
            where = dict.fromkeys(SHAPES, worker)
            with pytest.raises(WorkerError, match="the constructor failed on 1 of 1") as caught:
                DistributedOptimizer.over_ray(sgd, parameters(), where, transport=transport)
            text = f"no answer from {worker!r}, which may be gone: within 0.1 s it has not started"
            assert text in str(caught.value)
            assert "`ray status`" in str(caught.value)
            assert "give a start_timeout above 0.1" in str(caught.value)
            actor = transport._actors[worker]
            transport.close()
            with pytest.raises(ray.exceptions.RayActorError):
                ray.get(actor.__ray_ready__.remote(), timeout=LIMIT)


def test_one_that_dies_while_it_starts_is_named_at_once(pipe: Path) -> None:
    """The error comes as soon as the worker dies, long before its time limits."""
    transport = RayTransport(timeout=1e6, start_timeout=1e6)
    placed = transport.place(str(pipe), Shelf, torch.ones(2))
    pipe.write_text("die", "utf-8")
    error = placed.exception(LIMIT)
    assert isinstance(error, ConnectionError)
    assert f"no answer from {str(pipe)!r}" in str(error)
    assert isinstance(error.__cause__, ray.exceptions.RayActorError)
    transport.close()
