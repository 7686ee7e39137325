"""Job of test_torch_zero: DDP steps in its own hook, with our optimizers from torch's map."""

import copy
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

# torch deprecates its own TorchScript, and warns if its functional optimizers are imported.
warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)

from functional_optim import (  # noqa: E402  after the filter
    TorchOptimizer,
    adamw,
    functional_optim_map,
    qhm,
    register_functional_optim,
    sgd,
)
from tests.choices import pairs  # noqa: E402  after the filter
from tests.front_ends.ranks.strict import warnings_are_errors  # noqa: E402  after the filter

STEPS = 6

Case = tuple[Any, tuple[Any, ...], dict[str, Any]]


class QHM(torch.optim.Optimizer):
    """Class that torch does not know."""

    def __init__(self, params: Any, lr: float = 1.0, momentum: float = 0.999, nu: float = 0.7):
        super().__init__(params, {"lr": lr, "momentum": momentum, "nu": nu})


CASES: tuple[Case, ...] = (
    (torch.optim.AdamW, (1e-2,), {"betas": (0.9, 0.99), "eps": 1e-6}),
    (torch.optim.SGD, (1e-2,), {"momentum": 0.9, "weight_decay": 0.01}),
    (QHM, (0.1,), {"momentum": 0.9, "nu": 0.6}),
)


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 4), torch.nn.Linear(4, 1)
    )


def train(net: Any, rank: int, optimizer: Any = None) -> list[Tensor]:
    for step in range(STEPS):
        net.zero_grad()
        generator = torch.Generator().manual_seed(1000 * rank + step)
        net(torch.randn(3, 6, generator=generator)).square().mean().backward()
        if optimizer is not None:
            optimizer.step()
    dist.barrier()
    return [param.detach() for param in net.parameters()]


def parity(case: Case, rank: int, *, views: bool, static: bool, subset: bool) -> None:
    """Check that steps in the hook equal steps after backward, of all parameters or the first."""
    cls, args, options = case
    start = model()
    nets = [
        DistributedDataParallel(
            copy.deepcopy(start),
            gradient_as_bucket_view=views,
            static_graph=static,
            bucket_cap_mb=100e-6,
        )
        for _ in range(2)
    ]
    chosen = [list(net.parameters())[: 1 if subset else None] for net in nets]
    more = {"optim_params": chosen[0]} if subset else {}
    nets[0]._register_fused_optim(cls, *args, **more, **options)
    got = train(nets[0], rank)
    if cls is QHM:
        after: Any = TorchOptimizer(chosen[1], qhm(*args, **options))
    else:
        after = cls(chosen[1], *args, foreach=False, **options)
    want = train(nets[1], rank, after)
    assert all(torch.equal(one, two) for one, two in zip(got, want, strict=True)), (cls, got, want)
    changed = [not torch.equal(a, b) for a, b in zip(got, start.parameters(), strict=True)]
    assert changed == [True] + [not subset] * (len(changed) - 1)


def job() -> str:
    with warnings_are_errors():
        register_functional_optim(torch.optim.AdamW, adamw, replace=True, in_torch=True)
        register_functional_optim(torch.optim.SGD, sgd, replace=True, in_torch=True)
        register_functional_optim(QHM, qhm, in_torch=True)
        assert QHM in functional_optim_map
        both = [True, False]
        for options in pairs(case=CASES, views=both, static=both, subset=both):
            parity(rank=dist.get_rank(), **options)
    return "parity"
