"""Job of test_torch_zero: torch's ZeroRedundancyOptimizer, overlapped with DDP, steps QHM.

torch refuses its overlap hooks over gloo, because the interleaved hook may hang there. This job
removes only that refusal. The plain hook broadcasts after the last bucket, in one order on all
ranks. All code after the refusal is torch's own.
"""

import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

# torch deprecates its own TorchScript, and warns if its functional optimizers are imported.
warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)

from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook  # noqa: E402  after the filter
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook  # noqa: E402  after the filter
from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: E402  after the filter

from functional_optim import as_functional_optim, qhm, register_functional_optim  # noqa: E402  after the filter
from tests.front_ends.ranks.strict import warnings_are_errors  # noqa: E402  after the filter

HYPER = {"lr": 0.1, "momentum": 0.9, "nu": 0.7}
BACKWARDS = 6
SKIPPED = 2
"""Number of backward passes without a step: torch's overlap waits for DDP's final buckets."""


class QHM(torch.optim.Optimizer):
    """Class that torch does not know."""

    def __init__(self, params: Any, lr: float = 1.0, momentum: float = 0.999, nu: float = 0.7):
        super().__init__(params, {"lr": lr, "momentum": momentum, "nu": nu})


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 4), torch.nn.Linear(4, 1)
    )


def data_of(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(3, 6, generator=generator)


def loss_of(net: torch.nn.Module, rank: int, step: int) -> Tensor:
    return net(data_of(rank, step)).square().mean()


def locally(world_size: int) -> list[Tensor]:
    """Make the same steps in one process, on the mean of all ranks' gradients."""
    net = model()
    params = dict(net.named_parameters())
    optimizer = as_functional_optim(QHM, **HYPER)
    state = optimizer.init(params)
    for step in range(SKIPPED, BACKWARDS):
        grads = {name: torch.zeros_like(param) for name, param in params.items()}
        for rank in range(world_size):
            found = torch.autograd.grad(loss_of(net, rank, step), list(params.values()))
            for name, grad in zip(params, found, strict=True):
                grads[name] += grad / world_size
        optimizer.update_(params, grads, state)
    return list(params.values())


def together(rank: int) -> list[Tensor]:
    ddp = DistributedDataParallel(model(), bucket_cap_mb=100e-6)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), QHM, overlap_with_ddp=True, **HYPER)
    with pytest.raises(RuntimeError, match="Gloo"):
        ddp_zero_hook.hook_with_zero_step(allreduce_hook, ddp, zero)
    with mock.patch.object(ddp_zero_hook.dist, "get_backend", return_value="not gloo"):
        hook = ddp_zero_hook.hook_with_zero_step(allreduce_hook, ddp, zero)
    ddp.register_comm_hook(None, hook)
    for step in range(BACKWARDS):
        ddp.zero_grad()
        loss_of(ddp, rank, step).backward()
    scripted = zero.optim
    assert isinstance(scripted, torch.jit.ScriptModule)
    assert scripted.param_groups[0]["momentum"] == HYPER["momentum"]
    sizes = [0, 0]
    sizes[rank] = sum(param.numel() for param in scripted.param_groups[0]["params"])
    assert 0 < sizes[rank] < sum(param.numel() for param in ddp.parameters())
    return list(ddp.module.parameters())


def job() -> str:
    with warnings_are_errors():
        register_functional_optim(QHM, qhm, in_torch=True)
        got, want = together(dist.get_rank()), locally(dist.get_world_size())
        assert all(torch.equal(one, two) for one, two in zip(got, want, strict=True)), (got, want)
        assert not torch.equal(got[0], model()[0].weight)
    return "bitwise"
