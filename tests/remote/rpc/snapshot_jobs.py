"""Scenarios of snapshots over torch's RPC, as the trainer sees them."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc

from functional_optim import (
    DistributedOptimizer,
    accumulate,
    adamw,
    chain,
    clip_by_global_norm,
    partition,
    sgd,
)
from functional_optim.remote import SnapshotModule
from tests.remote.support import noise

TRAINERS = 4
ROUNDS = 3
LR = 0.125


class Whole(nn.Module):
    """Model of two layers; autograd saves the weight of the second one for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        with torch.no_grad():
            for seed, param in enumerate(self.parameters()):
                param.copy_(noise(seed, *param.shape))

    def forward(self, data: Tensor) -> Tensor:
        found: Tensor = self.second(torch.tanh(self.first(data)))
        return found


def direct(module: Any, data: Tensor) -> Tensor:
    """Run the module's forward pass on its own parameters."""
    found: Tensor = module.local_value().module(data)
    return found


def through(module: Any, data: Tensor) -> Tensor:
    found: Tensor = module.local_value()(data)
    return found


def rrefs_there(module: Any) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = module.local_value().parameter_rrefs()
    return found


def grads_there(module: Any, context_id: int) -> int:
    """Count the leaves of a context that have gradients."""
    return len(dist_autograd.get_gradients(context_id))


def kept_there() -> int:
    """Return the number of contexts with kept versions; a read first drops closed contexts."""
    from functional_optim.remote import contexts

    contexts.read({})
    return len(contexts._READS)


def remote_model(*owners: str) -> tuple[list[Any], list[tuple[str, Any]]]:
    """Make a model on each worker; return the models and all named parameters."""
    modules = [rpc.remote(owner, SnapshotModule, args=(Whole(),)) for owner in owners]
    params = []
    for owner, module in zip(owners, modules, strict=True):
        pairs = rpc.rpc_sync(owner, rrefs_there, args=(module,))
        params += [(f"{owner}.{name}", rref) for name, rref in pairs]
    return modules, params


def data_of(trainer: int) -> Tensor:
    return noise(40 + trainer, 5, 3)


def loss_of(found: Tensor) -> Tensor:
    return found.square().mean()


def in_turn(
    forward: Callable[[Any, Tensor], Tensor], module: Any, optimizer: DistributedOptimizer
) -> dict[str, Any]:
    """Train in rounds: all trainers run forward before the first one runs backward.

    Each trainer runs backward after the step of the trainer before it.
    """
    begun = threading.Barrier(TRAINERS)
    may_go = [[threading.Event() for _ in range(TRAINERS + 1)] for _ in range(ROUNDS)]
    failed: list[str] = []
    wrong: list[BaseException] = []

    def trainer(me: int) -> None:
        for events in may_go:
            with dist_autograd.context() as context_id:
                loss = loss_of(rpc.rpc_sync("ps1", forward, args=(module, data_of(me))))
                begun.wait(60)
                if me:
                    assert events[me].wait(60)
                try:
                    dist_autograd.backward(context_id, [loss])
                except RuntimeError as error:
                    failed.append(str(error))
                else:
                    optimizer.step(context_id)
                events[me + 1].set()
                begun.wait(60)

    def caught(me: int) -> None:
        try:
            trainer(me)
        except BaseException as error:  # noqa: BLE001  it is told
            wrong.append(error)
            begun.abort()

    threads = [threading.Thread(target=caught, args=(me,)) for me in range(TRAINERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong, wrong
    return {
        "failed": len(failed),
        "inplace": all("modified by an inplace operation" in one for one in failed),
        "steps": optimizer.counters()["ps1"].steps,
    }


def in_rounds() -> list[Tensor]:
    """Train in one process; all gradients of a round are taken at its beginning."""
    model = Whole()
    params = list(model.parameters())
    for _ in range(ROUNDS):
        grads = [torch.autograd.grad(loss_of(model(data_of(me))), params) for me in range(TRAINERS)]
        with torch.no_grad():
            for own in grads:
                for param, grad in zip(params, own, strict=True):
                    param.add_(grad, alpha=-LR)
    return [param.detach() for param in params]


def backward_passes_are_undisturbed() -> dict[str, Any]:
    modules, params = remote_model("ps1")
    plain = in_turn(direct, modules[0], DistributedOptimizer(sgd, params, lr=LR))
    modules, params = remote_model("ps1")
    optimizer = DistributedOptimizer(sgd, params, lr=LR)
    ours = in_turn(through, modules[0], optimizer)
    found = [rref.to_here().detach() for _, rref in params]
    counted = optimizer.counters()["ps1"]
    return {
        "plain": plain,
        "ours": ours,
        "same": [torch.equal(*pair) for pair in zip(found, in_rounds(), strict=True)],
        "staleness": sorted(counted.staleness.items()),
        "kept": rpc.rpc_sync("ps1", kept_there),
    }


def one_trainer() -> dict[str, Any]:
    """Train two models, each used twice in a pass, with gradients clipped in the context."""
    modules, params = remote_model("ps1", "trainer")
    optimizer = DistributedOptimizer(sgd, params, lr=LR)
    twins = [Whole(), Whole()]
    flat = [param for twin in twins for param in twin.parameters()]
    plain = torch.optim.SGD(flat, lr=LR, foreach=False)
    close = []
    for step in range(3):
        with dist_autograd.context() as context_id:
            outs = [
                rpc.rpc_sync(owner, through, args=(module, data_of(k)))
                for owner, module in zip(("ps1", "trainer"), modules, strict=True)
                for k in (step, step + 1)
            ]
            loss = torch.stack([loss_of(one) for one in outs]).sum()
            dist_autograd.backward(context_id, [loss])
            norm = optimizer.clip_grad_norm_(context_id, 0.5)
            optimizer.step(context_id)
        plain.zero_grad()
        loss = torch.stack(
            [loss_of(twin(data_of(k))) for twin in twins for k in (step, step + 1)]
        ).sum()
        loss.backward()
        want = torch.nn.utils.clip_grad_norm_(flat, 0.5)
        plain.step()
        close.append(torch.allclose(norm.float(), want))
    counted = optimizer.counters()
    return {
        "norm": close,
        "close": [
            torch.allclose(rref.to_here().detach(), twin.detach(), atol=1e-6)
            for (_, rref), twin in zip(params, flat, strict=True)
        ],
        "copied": [one.copied_bytes for one in counted.values()],
        "staleness": [sorted(one.staleness.items()) for one in counted.values()],
    }


def read_in_two_ways() -> dict[str, Any]:
    """Read a parameter in two ways in one context, and run a pass outside of all contexts."""
    modules, params = remote_model("ps1")
    optimizer = DistributedOptimizer(sgd, params, lr=LR)
    alone = rpc.rpc_sync("ps1", through, args=(modules[0], data_of(0)))
    text = ""
    with dist_autograd.context() as context_id:
        outs = [
            rpc.rpc_sync("ps1", one, args=(modules[0], data_of(0))) for one in (direct, through)
        ]
        dist_autograd.backward(context_id, [torch.stack(outs).sum()])
        try:
            optimizer.step(context_id)
        except RuntimeError as error:
            text = str(error)
        leaves = rpc.rpc_sync("ps1", grads_there, args=(modules[0], context_id))
    return {
        "same": [torch.equal(one, outs[0]) for one in (outs[1], alone)],
        "wanted": alone.requires_grad,
        "leaves": leaves,
        "text": text,
    }


def composed_in_contexts() -> dict[str, Any]:
    """Step a composed optimizer by contexts; a lambda assigns parameters to its parts."""
    parts = {"matrices": sgd(LR, momentum=0.9), "rest": adamw(LR)}
    chosen = chain(
        accumulate(2),
        clip_by_global_norm(0.1),
        partition(parts, lambda _, shape: "matrices" if len(shape) == 2 else "rest"),
    )
    modules, params = remote_model("ps1", "ps2")
    optimizer = DistributedOptimizer(chosen, params)
    twins = {owner: Whole() for owner in ("ps1", "ps2")}
    own = {
        f"{owner}.{name}": param
        for owner, twin in twins.items()
        for name, param in twin.named_parameters()
    }
    with torch.no_grad():
        state = chosen.init(own)
    for step in range(4):
        with dist_autograd.context() as context_id:
            outs = [
                rpc.rpc_sync(owner, through, args=(module, data_of(step)))
                for owner, module in zip(twins, modules, strict=True)
            ]
            dist_autograd.backward(context_id, [loss_of(outs[0]) + loss_of(outs[1])])
            optimizer.step(context_id)
        loss = [loss_of(twin(data_of(step))) for twin in twins.values()]
        grads = torch.autograd.grad(loss[0] + loss[1], list(own.values()))
        chosen.update_(own, dict(zip(own, grads, strict=True)), state)
    found = {name: rref.to_here().detach() for name, rref in params}
    return {
        "same": [torch.equal(one, own[name].detach()) for name, one in found.items()],
        "steps": [one.steps for one in optimizer.counters().values()],
    }


def one_buffer_a_call() -> dict[str, Any]:
    """Count the tensors sent to each worker with gradients, and with a state dict."""
    _, params = remote_model("ps1", "ps2")
    optimizer = DistributedOptimizer(sgd, params, lr=LR, momentum=0.5)
    grads = [torch.ones_like(one) for one in optimizer.snapshot().parameters.values()]
    saved = optimizer.state_dict()
    sent: list[int] = []
    pickler = rpc.api._default_pickler
    serialize = pickler.serialize

    def counted(value: Any) -> Any:
        found = serialize(value)
        sent.append(len(found[1]))
        return found

    pickler.serialize = counted  # type: ignore[method-assign]
    try:
        optimizer.step(grads)
        of_step = sent[:2]
        sent.clear()
        optimizer.load_state_dict(saved)
    finally:
        pickler.serialize = serialize  # type: ignore[method-assign]
    return {"step": of_step, "load": sent[:2]}


SCENARIOS = (
    backward_passes_are_undisturbed,
    one_trainer,
    read_in_two_ways,
    one_buffer_a_call,
    composed_in_contexts,
)
