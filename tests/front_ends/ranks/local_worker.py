"""Job of test_torch_zero: torch's ZeRO steps our optimizer as its local optimizer."""

import copy
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch deprecates its own TorchScript, and warns if its distributed optimizers are imported.
warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)

from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: E402  after the filter

from functional_optim import TorchOptimizer, qhm  # noqa: E402  after the filter
from tests.front_ends.ranks.strict import warnings_are_errors  # noqa: E402  after the filter

SHAPES = ((4, 3), (5,), (2, 2), (7,), ())


class QHM(TorchOptimizer):
    """Class as a user writes it: torch's interface with our rule."""

    def __init__(self, params: Any, lr: float = 1.0, momentum: float = 0.999, nu: float = 0.7):
        super().__init__(params, qhm(lr, momentum, nu))


def groups() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    return [{"params": params[:3]}, {"params": params[3:], "nu": 0.2}]


def step(optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed + 1)
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.randn(param.shape, generator=generator)
    optimizer.step()


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def assert_same(one: torch.optim.Optimizer, two: torch.optim.Optimizer) -> None:
    for a, b in zip(params_of(one), params_of(two), strict=True):
        assert torch.equal(a, b), (a, b)


def compare(rank: int) -> None:
    zero = ZeroRedundancyOptimizer(groups(), QHM, lr=0.1, momentum=0.9)
    alone = QHM(groups(), lr=0.1, momentum=0.9)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (zero, alone)]
    for seed in range(3):
        for one, schedule in zip((zero, alone), schedules, strict=True):
            step(one, seed)
            schedule.step()
        assert_same(zero, alone)
    zero.consolidate_state_dict(to=0)
    if rank == 0:
        resumed = QHM(groups(), lr=0.1, momentum=0.9)
        resumed.load_state_dict(copy.deepcopy(zero.state_dict()))
        with torch.no_grad():
            for source, target in zip(params_of(alone), params_of(resumed), strict=True):
                target.copy_(source)
        for seed in (7, 8):
            step(resumed, seed)
            step(alone, seed)
        assert_same(resumed, alone)


def job() -> str:
    with warnings_are_errors():
        compare(dist.get_rank())
    return "bitwise"
