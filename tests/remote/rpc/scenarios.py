"""Scenarios of one trainer and two workers over torch's RPC, as the trainer sees them."""

import threading
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc

from functional_optim import (
    DistributedOptimizer,
    as_functional_optim,
    qhm,
    register_functional_optim,
    sgd,
)
from functional_optim.remote import WorkerError
from functional_optim.remote.rpc import RpcTransport
from tests.remote.rpc import law_jobs, snapshot_jobs
from tests.remote.rpc.small_model import (
    OWNERS,
    QHM,
    SHAPES,
    Failing,
    backward,
    grad_there,
    hidden_there,
    local_gradients,
    locally,
    made,
    noise,
    raised,
    rrefs,
    same,
    train,
    values,
)
from tests.remote.support import LIMIT
from tests.remote.transports import tried


def equals_the_local_run() -> dict[str, Any]:
    register_functional_optim(QHM, qhm)
    params = rrefs()
    optimizer = DistributedOptimizer(QHM, list(params.values()), 0.1, momentum=0.9)
    train(optimizer, params, range(3))
    state = optimizer.state_dict()["state"]
    return {
        "same": same(values(params), locally(as_functional_optim(QHM, 0.1, 0.9), range(3))),
        "moved": not torch.equal(values(params)["first"], made("first").detach()),
        "steps": [int(state[k]["step"]) if k in state else 0 for k in range(4)],
        "functional": optimizer.is_functional_optim,
        "grads": [rpc.rpc_sync(OWNERS[name], grad_there, args=(params[name],)) for name in SHAPES],
        "workers": optimizer.workers,
    }


def no_part_in_the_context() -> dict[str, Any]:
    """Step after a pass in which ps2 takes no part, so that ps2 has no autograd context."""
    params = rrefs()
    optimizer = DistributedOptimizer(sgd, list(params.values()), lr=0.1)
    with dist_autograd.context() as context:
        one = rpc.rpc_sync("ps1", hidden_there, args=(params["first"], noise(9, 5, 4)))
        dist_autograd.backward(context, [one.sum()])
        optimizer.step(context)
    moved = [not torch.equal(one, made(name).detach()) for name, one in values(params).items()]
    return {"moved": moved}


def two_trainers_optimizers() -> dict[str, Any]:
    """Step several optimizers over the same parameters, as the trainers of torch's tutorials do."""
    params = rrefs()
    pair = [DistributedOptimizer(sgd, list(params.values()), lr=0.1) for _ in range(2)]
    grads = [noise(k, *shape) for k, shape in enumerate(SHAPES.values())]
    threads = [threading.Thread(target=one.step, args=(grads,)) for one in pair * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    want = {name: made(name).detach() for name in SHAPES}
    for _ in range(6):
        for one, grad in zip(want.values(), grads, strict=True):
            one.add_(grad, alpha=-0.1)
    found, old = values(params), pair[0].snapshot()
    pair[0].limit_staleness(0)
    pair[1].step(grads)
    return {"same": same(found, want), "old": raised(lambda: pair[0].step(grads, old))}


def clipping_and_scaling() -> dict[str, Any]:
    params, scaler = rrefs(), torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = DistributedOptimizer(sgd, list(params.items()), lr=1.0)
    scaler.scale(torch.ones(()))
    twins = {name: made(name) for name in SHAPES}
    with dist_autograd.context() as context:
        backward(params, context, 0, scale=4.0)
        first = optimizer.unscale_(context, scaler)
        norm = optimizer.clip_grad_norm_(context, 0.01)
        scaler.step(optimizer, context)
        scaler.update()
    grads = local_gradients(twins, 0)
    for name, grad in grads.items():
        twins[name].grad = grad
    want = torch.nn.utils.clip_grad_norm_(twins.values(), 0.01)
    torch.optim.SGD(twins.values(), lr=1.0).step()
    before = values(params)
    close = [torch.allclose(before[name], one.detach()) for name, one in twins.items()]
    with dist_autograd.context() as context:
        backward(params, context, 0, scale=float("inf"))
        second = optimizer.unscale_(context, scaler)
        scaler.step(optimizer, context)
        scaler.update()
    return {
        "close": close,
        "norm": torch.allclose(norm.float(), want),
        "found": [first, second],
        "skipped": same(values(params), before),
        "scale": scaler.get_scale(),
    }


def embedding_there(table: Any, rows: Tensor) -> Tensor:
    return torch.nn.functional.embedding(rows, table.local_value(), sparse=True)


def sparse_gradients() -> dict[str, Any]:
    table = rpc.remote("ps2", made, args=("first",))
    optimizer = DistributedOptimizer(torch.optim.SGD, [table], lr=1.0)
    with dist_autograd.context() as context:
        found = rpc.rpc_sync("ps2", embedding_there, args=(table, torch.tensor([1, 3, 1])))
        dist_autograd.backward(context, [found.sum()])
        optimizer.step(context)
    moved = (table.to_here() - made("first")).detach()
    return {"rows": moved[:, 0].tolist()}


def bad_input() -> dict[str, Any]:
    params = rrefs()
    good = list(params.values())
    no_tensor = rpc.remote("ps2", dict)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        failing = DistributedOptimizer(Failing, good, where=("ps1", "ps2"))
    optimizer = DistributedOptimizer(sgd, good, lr=0.1)

    def failing_step() -> None:
        failing.step([None] * 4)

    def catch() -> dict[str, str]:
        try:
            failing_step()
        except WorkerError as error:
            return {name: type(one).__name__ for name, one in error.errors.items()}
        return {}

    return {
        "warned": [str(one.message).partition(" has ")[0] for one in seen],
        "empty": raised(lambda: DistributedOptimizer(sgd, [])),
        "no list": raised(lambda: DistributedOptimizer(sgd, good[0])),
        "no rref": raised(lambda: DistributedOptimizer(sgd, [*good, noise(0, 2)])),
        "no tensor": raised(lambda: DistributedOptimizer(sgd, [good[1], no_tensor])),
        "twice": raised(lambda: DistributedOptimizer(sgd, [good[0], good[0]])),
        "negative": raised(lambda: DistributedOptimizer(torch.optim.SGD, good, lr=-1)),
        "no time": raised(lambda: DistributedOptimizer(sgd, good, start_timeout=0.0)),
        "no context": raised(lambda: optimizer.step(12345)),
        "failing": raised(failing_step),
        "errors": catch(),
    }


def the_transport() -> dict[str, Any]:
    found = tried(RpcTransport(), "ps1")
    gone = RpcTransport().place("nobody", dict).exception(LIMIT)
    return {**found, "gone": f"{type(gone).__name__}: {gone}"}


SCENARIOS = (
    the_transport,
    equals_the_local_run,
    no_part_in_the_context,
    two_trainers_optimizers,
    clipping_and_scaling,
    sparse_gradients,
    bad_input,
    *snapshot_jobs.SCENARIOS,
    law_jobs.the_laws,
)
