"""Loss or delay of a trainer and of workers over torch's RPC, seen by another trainer."""

import contextlib
import os
import signal
import threading
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc

from functional_optim import DistributedOptimizer
from functional_optim._torch.distributed import rpc_over_sockets
from functional_optim.remote import SnapshotModule
from functional_optim.remote.rpc import RpcTransport
from functional_optim.remote.worker import WorkerOptimizer
from sharding.testing import at
from tests.remote.rpc import law_jobs
from tests.remote.rpc.small_model import raised
from tests.remote.rpc.snapshot_jobs import Whole, data_of, loss_of, rrefs_there, through

NAMES = ("trainer", "ps1", "ps2", "other")
OWNERS = ("ps1", "ps2")
LR = 0.125
STEPS = 4
CALL_SECONDS = 100_000.0
"""Time limit of a call, longer than the test: an error that waits for it never comes."""

Params = list[tuple[str, Any]]


class Waiting(torch.optim.Optimizer):
    """Optimizer class without functional equivalent whose steps on "ps2" wait for an event."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if rpc.get_worker_info().name == "ps2":
            _MAY_STEP.wait()
        for param in self.param_groups[0]["params"]:
            param.data.add_(1.0)


def module_of(values: Mapping[str, Tensor] | None = None) -> SnapshotModule:
    """Make the model on a worker, with these values or its initial ones."""
    made = Whole()
    if values is not None:
        made.load_state_dict(values)
    return SnapshotModule(made)


def on(
    owners: tuple[str, ...], values: Mapping[str, Tensor] | None = None
) -> tuple[list[Any], Params]:
    """Make one half of the model on each owner; return the modules and the parameters.

    The names of the parameters begin with their first owners, for other owners too.
    """
    modules: list[Any] = []
    params: Params = []
    for first, owner in zip(OWNERS, owners, strict=True):
        own = None
        if values is not None:
            pairs = values.items()
            own = {name[4:]: one.detach() for name, one in pairs if name.startswith(first)}
        modules.append(rpc.remote(owner, module_of, args=(own,)))
        pairs_there = rpc.rpc_sync(owner, rrefs_there, args=(modules[-1],))
        params += [(f"{first}.{name}", rref) for name, rref in pairs_there]
    return modules, params


def backward(modules: list[Any], context_id: int, step: int) -> None:
    """Run forward and backward passes through both halves."""
    outs = [rpc.rpc_sync(one.owner_name(), through, args=(one, data_of(step))) for one in modules]
    dist_autograd.backward(context_id, [loss_of(outs[0]) + loss_of(outs[1])])


def train(optimizer: DistributedOptimizer, modules: list[Any], steps: range) -> None:
    for step in steps:
        with dist_autograd.context() as context_id:
            backward(modules, context_id, step)
            optimizer.step(context_id)


def locally(steps: int) -> dict[str, Tensor]:
    halves = {name: Whole() for name in OWNERS}
    params = [param for half in halves.values() for param in half.parameters()]
    optimizer = torch.optim.AdamW(params, lr=LR, foreach=False)
    for step in range(steps):
        optimizer.zero_grad()
        outs = [half(data_of(step)) for half in halves.values()]
        (loss_of(outs[0]) + loss_of(outs[1])).backward()
        optimizer.step()
    return {
        f"{name}.{key}": param.detach()
        for name, half in halves.items()
        for key, param in half.named_parameters()
    }


def same(optimizer: DistributedOptimizer, steps: int, *workers: str) -> list[bool]:
    """Compare each parameter with that of a local run; return a list of bools."""
    found, want = optimizer.snapshot(workers=workers or None).parameters, locally(steps)
    return [torch.equal(one, want[name]) for name, one in found.items()]


def vanish(modules: list[Any], params: Params) -> None:
    """Run a backward pass as another trainer, then kill this process before its step."""
    DistributedOptimizer(torch.optim.AdamW, params, lr=LR)
    with dist_autograd.context() as context_id:
        backward(modules, context_id, 7)
        os.kill(os.getpid(), signal.SIGKILL)


def die_in_the_next_step() -> None:
    """Kill this worker in its next step, after it writes parameters and before it answers."""
    WorkerOptimizer._count_versions = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign,return-value,assignment]


def hastily(transport: RpcTransport, handle: Any, method: str, *args: Any) -> Any:
    """Call with a short time limit for the step of the waiting worker, else with a long one."""
    waits = transport._addresses[handle].worker == "ps2" and method == "step"
    rpc._set_rpc_timeout(1.0 if waits else CALL_SECONDS)
    try:
        return _CALL(transport, handle, method, *args)
    finally:
        rpc._set_rpc_timeout(CALL_SECONDS)


_CALL = RpcTransport.call


def as_the_trainer() -> dict[str, Any]:
    """Wait for two starts, lose a trainer, wait for a slow worker, and lose it in a step."""
    found: dict[str, Any] = {
        "slow start": law_jobs.slow_start(),
        "endless start": law_jobs.endless_start(),
    }
    modules, params = on(OWNERS)
    optimizer = DistributedOptimizer(torch.optim.AdamW, params, lr=LR)
    train(optimizer, modules, range(2))
    saved, values = optimizer.state_dict(), optimizer.snapshot().parameters
    at("a trainer is gone")
    found["vanished"] = raised(lambda: rpc.rpc_sync("other", vanish, args=(modules, params)))
    train(optimizer, modules, range(2, 3))
    found["undisturbed"] = same(optimizer, 3)
    at("a worker waits")
    slow_params = on(OWNERS)[1]
    slow = DistributedOptimizer(Waiting, slow_params)
    RpcTransport.call = hastily  # type: ignore[method-assign]
    found["slow"] = raised(lambda: slow.step([None] * len(slow_params)))
    RpcTransport.call = _CALL  # type: ignore[method-assign]
    rpc.rpc_sync("ps2", _let_step)
    first = slow.snapshot(workers=["ps1"]).parameters
    found["others"] = [torch.equal(one, locally(0)[name] + 1.0) for name, one in first.items()]
    at("a worker is killed")
    rpc.rpc_sync("ps2", die_in_the_next_step)
    found["killed"] = raised(lambda: train(optimizer, modules, range(3, STEPS)))
    found["unsaved"] = raised(optimizer.state_dict)
    found["left"] = same(optimizer, STEPS, "ps1")
    state = optimizer.state_dict(workers=["ps1"])["state"]
    found["steps"] = {number: int(one["step"]) for number, one in state.items()}
    at("a run goes on")
    modules, params = on(("trainer", "ps1"), values)
    resumed = DistributedOptimizer(torch.optim.AdamW, params, lr=9.0)
    resumed.load_state_dict(saved)
    train(resumed, modules, range(2, STEPS))
    found["resumed"] = same(resumed, STEPS)
    return found


def lose(meeting: str) -> dict[str, Any]:
    """Run one process; return the findings of the trainer, or nothing in other processes."""
    # torch's init_rpc uses a process group in a way that torch.distributed deprecates.
    warnings.filterwarnings("ignore", r"You are using a Backend <class", UserWarning)
    warnings.filterwarnings("ignore", ".* has no functional equivalent", UserWarning)
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    rank = torch.distributed.get_rank()
    options = rpc_over_sockets(init_method=f"file://{meeting}", rpc_timeout=CALL_SECONDS)
    rpc.init_rpc(NAMES[rank], rank=rank, world_size=len(NAMES), rpc_backend_options=options)
    found = {}
    if rank == 0:
        found = as_the_trainer()
        with contextlib.suppress(RuntimeError):  # the worker can be gone before it answers
            rpc.rpc_sync("ps1", _end)
    else:
        _THE_END.wait()
    rpc.shutdown(graceful=False)
    return found


_MAY_STEP, _THE_END = threading.Event(), threading.Event()


def _let_step() -> None:
    _MAY_STEP.set()


def _end() -> None:
    _THE_END.set()
