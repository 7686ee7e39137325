"""Job of test_torch_distributed_optimizer: torch's DistributedOptimizer steps QHM over RPC.

Both workers own parameters. The driver compares them, bit for bit, with a local run.
"""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc

from functional_optim import as_functional_optim, qhm, register_functional_optim
from functional_optim._torch.distributed import rpc_over_sockets
from tests.front_ends.ranks.strict import warnings_are_errors

# torch deprecates its own TorchScript, and warns if its DistributedOptimizer is imported.
warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)

STEPS = 4
HYPER = {"lr": 0.1, "momentum": 0.9, "nu": 0.7}


class QHM(torch.optim.Optimizer):
    """Class that torch does not know."""

    def __init__(self, params: Any, lr: float = 1.0, momentum: float = 0.999, nu: float = 0.7):
        super().__init__(params, {"lr": lr, "momentum": momentum, "nu": nu})


def made(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).requires_grad_()


def hidden(weight: Tensor, data: Tensor) -> Tensor:
    return torch.tanh(data @ weight)


def hidden_there(weight: Any, data: Tensor) -> Tensor:
    """Compute the part of the model that runs on the worker that owns ``weight``."""
    return hidden(weight.local_value(), data)


def data_of(step: int) -> Tensor:
    return made(100 + step, 5, 4).detach()


def loss_of(inner: Tensor, head: Tensor) -> Tensor:
    return (inner @ head).square().mean()


def all_params() -> list[Tensor]:
    """Return two parameters that the loss uses, and one that the loss does not use."""
    return [made(1, 4, 3), made(2, 3, 2), made(3, 7)]


def locally() -> list[Tensor]:
    params = all_params()
    optimizer = as_functional_optim(QHM, **HYPER)
    state = optimizer.init(params)
    for step in range(STEPS):
        loss = loss_of(hidden(params[0], data_of(step)), params[1])
        grads = [*torch.autograd.grad(loss, params[:2]), None]
        optimizer.update_(params, grads, state)
    return params


def drive() -> None:
    from torch.distributed.optim import DistributedOptimizer

    register_functional_optim(QHM, qhm, in_torch=True)
    far, unused = (rpc.remote("worker1", made, args=one) for one in ((1, 4, 3), (3, 7)))
    head = made(2, 3, 2)
    optimizer = DistributedOptimizer(QHM, [far, rpc.RRef(head), unused], **HYPER)
    assert optimizer.is_functional_optim
    for step in range(STEPS):
        with dist_autograd.context() as context:
            inner = rpc.rpc_sync("worker1", hidden_there, args=(far, data_of(step)))
            dist_autograd.backward(context, [loss_of(inner, head)])
            optimizer.step(context)
    got = [far.to_here(), head, unused.to_here()]
    want = locally()
    assert all(torch.equal(one, two) for one, two in zip(got, want, strict=True)), (got, want)
    moved = [not torch.equal(one, two) for one, two in zip(got, all_params(), strict=True)]
    assert moved == [True, True, False], moved


def job(meeting: str) -> str | None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    options = rpc_over_sockets(init_method=f"file://{meeting}", rpc_timeout=60)
    with warnings_are_errors():
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=ranks, rpc_backend_options=options)
        try:
            if rank == 0:
                drive()
        finally:
            rpc.shutdown()
    return "bitwise" if rank == 0 else None
