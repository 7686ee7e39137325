"""Small model with parameters on a trainer and two workers, and its twin in one process."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc

from functional_optim import DistributedOptimizer

NAMES = ("trainer", "ps1", "ps2")
SHAPES = {"first": (4, 3), "second": (3, 3), "head": (3, 2), "unused": (7,)}
OWNERS = {"first": "ps1", "second": "ps2", "head": "trainer", "unused": "ps1"}


class QHM(torch.optim.Optimizer):
    """Optimizer class that only the trainer has registered."""

    def __init__(self, params: Any, lr: float = 1.0, momentum: float = 0.999, nu: float = 0.7):
        super().__init__(params, {"lr": lr, "momentum": momentum, "nu": nu})


class Failing(torch.optim.Optimizer):
    """Optimizer class without functional equivalent that fails in the steps of some workers."""

    def __init__(self, params: Any, where: tuple[str, ...]) -> None:
        super().__init__(params, {})
        self.where = where

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if rpc.get_worker_info().name in self.where:
            raise LookupError("nothing to be found")
        for param in self.param_groups[0]["params"]:
            param.data.add_(1.0)


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def made(name: str) -> Tensor:
    return noise(list(SHAPES).index(name), *SHAPES[name]).requires_grad_()


def hidden(weight: Tensor, data: Tensor) -> Tensor:
    return torch.tanh(data @ weight)


def hidden_there(weight: Any, data: Tensor) -> Tensor:
    return hidden(weight.local_value(), data)


def grad_there(param: Any) -> Tensor | None:
    found: Tensor | None = param.local_value().grad
    return found


def rrefs() -> dict[str, Any]:
    return {
        name: rpc.RRef(made(name)) if owner == "trainer" else rpc.remote(owner, made, args=(name,))
        for name, owner in OWNERS.items()
    }


def backward(params: dict[str, Any], context: int, step: int, scale: float = 1.0) -> None:
    """Run a forward and a backward pass through all workers, with other data in each step."""
    data = noise(100 + step, 5, 4)
    one = rpc.rpc_sync("ps1", hidden_there, args=(params["first"], data))
    two = rpc.rpc_sync("ps2", hidden_there, args=(params["second"], one))
    loss = (two @ params["head"].local_value()).square().mean() * scale
    dist_autograd.backward(context, [loss])


def train(optimizer: DistributedOptimizer, params: dict[str, Any], steps: range) -> None:
    for step in steps:
        with dist_autograd.context() as context:
            backward(params, context, step)
            optimizer.step(context)


def values(params: dict[str, Any]) -> dict[str, Tensor]:
    return {name: one.to_here().detach().clone() for name, one in params.items()}


def local_gradients(params: dict[str, Tensor], step: int) -> dict[str, Tensor | None]:
    used = [params[name] for name in ("first", "second", "head")]
    inner = hidden(used[1], hidden(used[0], noise(100 + step, 5, 4)))
    loss = (inner @ used[2]).square().mean()
    return {**dict(zip(SHAPES, torch.autograd.grad(loss, used), strict=False)), "unused": None}


def locally(optimizer: Any, steps: range) -> dict[str, Tensor]:
    params = {name: made(name) for name in SHAPES}
    state = optimizer.init(list(params.values()))
    for step in steps:
        grads = list(local_gradients(params, step).values())
        optimizer.update_(list(params.values()), grads, state)
    return {name: param.detach() for name, param in params.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in SHAPES)


def raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001  it is told
        return f"{type(error).__name__}: {error}"
    return "nothing"
