"""The ways of stepping a DDP model that the demo compares.

A front-end is a function of (ddp, hyper-parameters) that sets everything up and returns a
:class:`FrontEnd`. To add one: write it, and name it in FRONT_ENDS, with what it is compared with.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from functional_optim import adamw
from hooks import (
    AveragingSchedule,
    PostLocalSGDOptimizer,
    PostLocalSGDState,
    ScheduledModelAverager,
    post_localSGD_hook,
    step_hook,
    zero_step_hook,
)
from sharding import ZeroRedundancyOptimizer


class HyperParameters(NamedTuple):
    """AdamW's, the same for every run."""

    learning_rate: Callable[[float], float]  # of the number of steps made
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1


def torch_adamw(
    params: Iterable[Tensor], hyper: HyperParameters
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Torch's optimizer, and the scheduler of its learning rate."""
    # The base rate is 1, so that the scheduler's product is exactly the schedule's value.
    optimizer = torch.optim.AdamW(
        params, lr=1.0, betas=hyper.betas, weight_decay=hyper.weight_decay, foreach=False
    )
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, hyper.learning_rate)


class FrontEnd(ABC):
    """A way of stepping, for the training loop; by default, gradients are summed at each step."""

    def step(self) -> None:  # noqa: B027  where nothing is left to do
        """Called after each backward: do what is left to do of the step."""

    def finish(self) -> None:  # noqa: B027  where all ranks have the same model
        """Called after the last step: make the ranks' models one."""

    @abstractmethod
    def state_bytes(self) -> int:
        """The memory of this rank's optimizer state."""

    def sent_bytes(self, reduced: float, steps: int) -> float:
        """Return the bytes that this rank has sent to other hosts.

        Args:
            reduced: bytes that a rank sends where all gradients are summed over all ranks.
            steps: that were made.
        """
        return reduced * steps


class StepHook(FrontEnd):
    """AdamW of the pure core, stepped bucket by bucket inside DDP, while backward goes on."""

    def __init__(self, ddp: DistributedDataParallel, hyper: HyperParameters) -> None:
        optimizer = adamw(
            lr=hyper.learning_rate, betas=hyper.betas, weight_decay=hyper.weight_decay
        )
        self._optimizer_state = step_hook(ddp, optimizer)

    def state_bytes(self) -> int:
        leaves = optree.tree_leaves(self._optimizer_state.state.leaves)
        return tensor_bytes(leaf for leaf in leaves if isinstance(leaf, Tensor))


class TorchAdamW(FrontEnd):
    """The twin: torch.optim.AdamW after DDP, with a scheduler."""

    def __init__(self, ddp: DistributedDataParallel, hyper: HyperParameters) -> None:
        self._optimizer, self._scheduler = torch_adamw(ddp.parameters(), hyper)
        # DDP without a hook multiplies by 1 / ranks where its all-reduce hook divides by ranks:
        # for 3 ranks these differ in the last bit. All runs divide.
        ddp.register_comm_hook(None, allreduce_hook)

    def step(self) -> None:
        """Step all parameters."""
        self._optimizer.step()
        self._scheduler.step()

    def state_bytes(self) -> int:
        return state_bytes(self._optimizer)


class ZeroStepHook(FrontEnd):
    """AdamW with its state sharded, stepped while backward goes on.

    Each gradient is reduced to the rank that owns it, and parameters come back from their owners.
    """

    def __init__(self, ddp: DistributedDataParallel, hyper: HyperParameters) -> None:
        self._zero = ZeroRedundancyOptimizer(
            ddp.parameters(),
            torch.optim.AdamW,
            overlap_with_ddp=True,
            policy="elements",
            lr=1.0,
            betas=hyper.betas,
            weight_decay=hyper.weight_decay,
        )
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(self._zero, hyper.learning_rate)
        ddp.register_comm_hook(None, zero_step_hook(ddp, self._zero))

    def step(self) -> None:
        """Set the rate of the next step: when backward returns, this one has been made."""
        self._scheduler.step()

    def state_bytes(self) -> int:
        return state_bytes(self._zero.optim)


class LocalSGD(FrontEnd):
    """AdamW on each rank's own gradients, and now and then a mean of parameters over all ranks.

    Args:
        ddp: the module.
        hyper: AdamW's.
        period: the number of steps from one mean to the next.
    """

    def __init__(
        self, ddp: DistributedDataParallel, hyper: HyperParameters, *, period: int
    ) -> None:
        schedule = AveragingSchedule(period, warmup=WARMUP)
        state = PostLocalSGDState.from_schedule(schedule, post_local_gradient_allreduce=False)
        ddp.register_comm_hook(state, post_localSGD_hook)
        inner = torch.optim.AdamW(
            ddp.parameters(), lr=1.0, betas=hyper.betas, weight_decay=hyper.weight_decay
        )
        self._params = list(ddp.parameters())
        self._averager = ScheduledModelAverager(schedule)
        self._optimizer = PostLocalSGDOptimizer(inner, self._averager)
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(self._optimizer, hyper.learning_rate)

    def step(self) -> None:
        """Step all parameters, and take their mean where it is due."""
        self._optimizer.step()
        self._scheduler.step()

    def finish(self) -> None:
        """Take one more mean, which is not counted."""
        ScheduledModelAverager(AveragingSchedule(1)).average_parameters(self._params)

    def state_bytes(self) -> int:
        return state_bytes(self._optimizer)

    def sent_bytes(self, reduced: float, steps: int) -> float:
        # Gradients in the first steps, then parameters.
        return reduced * min(steps, WARMUP) + self._averager.bytes_sent


MakeFrontEnd = Callable[[DistributedDataParallel, HyperParameters], FrontEnd]

WARMUP = 4
"""Steps in which gradients are averaged over all ranks, before local SGD begins."""

LOSS_SPREAD = 0.001
"""What adds gradients in another order ends within this share of A's validation loss.

Rounding alone makes about a thousandth of this: 3 ranks, 400 steps.
"""

LOCAL_SPREAD = 0.1
"""Local SGD ends within this share of A's validation loss, where it is averaged every 16 steps."""


class ComparedRun(NamedTuple):
    """Run that is compared with others."""

    name: str
    """A letter, for tables."""
    title: str
    """What steps it."""
    make: Callable[..., Any]
    """A front-end of (ddp, hyper); or, under RPC, a run of (way, model, hyper)."""
    exact: bool
    """Whether it must have the bits of the first: it adds the same numbers in the same order."""
    spread: float = LOSS_SPREAD
    """Where it is not exact: by what share its last validation loss may differ from the first's."""
    differs: str = ""
    """Why it is not exact."""


def _step_hook(ranks: int) -> list[ComparedRun]:
    """A and B reduce gradients by an all-reduce, whose order of sums is its own, C in rank order.

    Of up to two numbers there is but one sum.
    """
    why = (
        "adds gradients in rank order, A in the order of its all-reduce: these sums differ by "
        "rounding, and so do the runs"
    )
    zero = "ZeroRedundancyOptimizer, zero_step_hook"
    return [
        ComparedRun("A", "functional-optim, step-hook", StepHook, exact=True),
        ComparedRun("B", "torch.optim.AdamW, after DDP", TorchAdamW, exact=True),
        ComparedRun("C", zero, ZeroStepHook, exact=ranks <= 2, differs="" if ranks <= 2 else why),
    ]


def _local_sgd(ranks: int) -> list[ComparedRun]:
    """DDP beside local SGD that takes a mean often, and one that takes it seldom."""
    ways = [ComparedRun("A", "torch.optim.AdamW, after DDP", TorchAdamW, exact=True)]
    for name, period in (("B", 4), ("C", 16)):
        make = partial(LocalSGD, period=period)
        title = f"local SGD, a mean of parameters every {period} steps"
        why = f"steps each rank by its own gradients, and averages every {period} steps"
        ways.append(ComparedRun(name, title, make, exact=False, spread=LOCAL_SPREAD, differs=why))
    return ways


FRONT_ENDS: Mapping[str, Callable[[int], list[ComparedRun]]] = {
    "step-hook": _step_hook,
    "local-sgd": _local_sgd,
}
"""By the name that ``--front-end`` takes: the runs that are compared, on so many ranks."""


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """The memory of the tensors that stand in an optimizer's ``state``."""
    return tensor_bytes(
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """The memory that is held for these tensors.

    Views of the same memory count once, and a view of a part of it counts as all of it.
    """
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
