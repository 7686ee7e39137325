"""Jobs of the processes over torch's RPC: run all scenarios, or lose a worker."""

import contextlib
import os
import threading
import traceback
import warnings
from typing import Any

import torch
from torch.distributed import rpc

from functional_optim import DistributedOptimizer
from functional_optim._torch import rpc_over_sockets
from sharding.testing import at
from tests.remote.rpc import law_jobs
from tests.remote.rpc.scenarios import SCENARIOS
from tests.remote.rpc.small_model import NAMES, Failing, made, raised, rrefs
from tests.remote.support import LIMIT

LOST_SECONDS = 120.0
"""Longest time without progress, in seconds, of the run that loses a worker."""


def _start(meeting: str, seconds: float) -> str:
    # torch's init_rpc uses a process group in a way that torch.distributed deprecates.
    warnings.filterwarnings("ignore", r"You are using a Backend <class", UserWarning)
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    rank = torch.distributed.get_rank()
    options = rpc_over_sockets(init_method=f"file://{meeting}", rpc_timeout=seconds)
    rpc.init_rpc(NAMES[rank], rank=rank, world_size=len(NAMES), rpc_backend_options=options)
    return NAMES[rank]


def drive(meeting: str) -> dict[str, Any]:
    """Run all scenarios on the trainer; return by name the result, or the traceback."""
    found = {}
    if _start(meeting, 60) == "trainer":
        for scenario in SCENARIOS:
            at(scenario.__name__)
            try:
                found[scenario.__name__] = scenario()
            except Exception:  # noqa: BLE001  the others go on
                found[scenario.__name__] = {"wrong": traceback.format_exc()}
    rpc.shutdown()
    return found


def lose_a_worker(meeting: str) -> dict[str, Any]:
    """Run with one worker that places objects slowly, and one that is killed in a step.

    The time limit of a call is far longer than that of the whole scenario.
    """
    found: dict[str, Any] = {}
    if _start(meeting, 1000 * LOST_SECONDS) == "trainer":
        warnings.filterwarnings("ignore", ".* has no functional equivalent", UserWarning)
        params = rrefs()
        found["slow"] = law_jobs.slow_start()
        found["endless"] = law_jobs.endless_start()
        at("the step")
        optimizer = DistributedOptimizer(Failing, list(params.values()), where=("ps2",), how="die")
        found["step"] = raised(lambda: optimizer.step([None] * 4))
        found["state"] = raised(optimizer.state_dict)
        found["stepped"] = torch.equal(params["first"].to_here(), made("first") + 1.0)
        at("the end")
        with contextlib.suppress(RuntimeError):  # the worker can be gone before it answers
            rpc.rpc_sync("ps1", _let_go, args=())
    else:
        _LET_GO.wait(LIMIT)
    rpc.shutdown(graceful=False)
    return found


_LET_GO = threading.Event()


def _let_go() -> None:
    _LET_GO.set()
