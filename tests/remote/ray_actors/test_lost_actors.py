"""Actors that die or hang: errors name them, other actors save state, and runs resume."""

import functools
import os
import signal
import threading
from concurrent.futures import Future
from typing import Any

import pytest
import ray
import torch

from functional_optim import DistributedOptimizer, adamw
from functional_optim.remote import RayTransport, WorkerError
from tests.choices import case

from ..laws import values
from ..support import LIMIT, SHAPES, assert_same, gradients, locally, parameters, placement

over_ray = DistributedOptimizer.over_ray


class Lost(torch.optim.Optimizer):
    """Optimizer class that sends a signal to the process that owns "hidden.weight"."""

    def __init__(self, params: Any, how: int) -> None:
        super().__init__(params, {})
        self.how = how

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        if any(param.shape == SHAPES["hidden.weight"] for param in params):
            os.kill(os.getpid(), self.how)
        for param in params:
            param.data.add_(1.0)


def hastily(transport: RayTransport, handle: Any, method: str, *args: Any) -> "Future[Any]":
    """Call with a short timeout for the step of the worker that hangs, else with a long one."""
    hangs = handle.worker == "hangs" and method == "step"
    transport._timeout = 2.0 if hangs else 60.0
    return RayTransport.call(transport, handle, method, *args)


def test_a_run_goes_on_elsewhere_when_an_actor_is_killed(shared: RayTransport) -> None:
    """The run resumes from the saved state, bit for bit; the other actor still saves its own."""
    given = [gradients(step) for step in range(4)]
    where = {name: worker.replace("ps1", "killed") for name, worker in placement(2).items()}
    optimizer = over_ray(adamw, parameters(), where, lr=0.1, transport=shared)
    for one in given[:2]:
        optimizer.step(one)
    saved, params = optimizer.state_dict(), values(optimizer)
    optimizer.step(given[2])
    event = shared.place("killed", threading.Event).result(LIMIT)
    waits = shared.call(event, "wait")  # never succeeds; it fails when the actor is gone
    ray.kill(shared._actors["killed"])
    assert isinstance(waits.exception(LIMIT), ConnectionError)
    for what, call in (
        ("step", lambda: optimizer.step(given[3])),
        ("state_dict", optimizer.state_dict),
        ("snapshot", optimizer.snapshot),
    ):
        text = rf"{what} failed on 1 of 2 workers:\n  killed: ConnectionError: no answer from"
        with pytest.raises(WorkerError, match=text) as caught:
            call()
        assert "ray.kill" in str(caught.value)
    want = locally(adamw(lr=0.1), given)
    of_others = optimizer.snapshot(workers=["ps0"]).parameters
    assert_same(of_others, {name: want[name] for name in ("embed.weight", "hidden.bias")})
    state = optimizer.state_dict(workers=["ps0"])["state"]
    assert {number: int(one["step"]) for number, one in state.items()} == {0: 4, 2: 4}
    optimizer.close()
    resumed = over_ray(adamw, params, placement(2, 1), transport=shared)
    resumed.load_state_dict(saved)
    for one in given[2:]:
        resumed.step(one)
    assert_same(values(resumed), want)
    resumed.close()


@pytest.mark.filterwarnings("ignore:.*no functional equivalent")
def test_one_that_dies_or_hangs_in_a_step_is_named(
    shared: RayTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other worker completes the step."""
    monkeypatch.setattr(shared, "_timeout", shared._timeout)  # restores the value at the end
    monkeypatch.setattr(shared, "call", functools.partial(hastily, shared))
    for how, worker in ((signal.SIGKILL, "dies"), (signal.SIGSTOP, "hangs")):
        with case(how=how):
            where = dict.fromkeys(SHAPES, "ps0") | {"hidden.weight": worker}
            optimizer = over_ray(Lost, parameters(), where, transport=shared, how=int(how))
            place = shared.place(worker, os.getpid).result(LIMIT)
            process = int(shared.call(place, "__int__").result(LIMIT))
            text = f"step failed on 1 of 2 workers:\n  {worker}: ConnectionError: no answer from "
            with pytest.raises(WorkerError, match=text) as caught:
                optimizer.step(gradients(0))
            if how == signal.SIGSTOP:
                assert "nothing came within 2 s" in str(caught.value)
                os.kill(process, signal.SIGKILL)
            found = optimizer.snapshot(workers=["ps0"]).parameters
            assert_same(found, {name: parameters()[name] + 1.0 for name in found})
            assert len(found) == 3
            optimizer.close()
