"""Front-ends that the demo compares: ways to step a DDP model.

To add a front-end, derive from :class:`FrontEnd`, and add its runs to FRONT_ENDS.
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
    """Hyper-parameters of AdamW, equal for all runs."""

    learning_rate: Callable[[float], float]  # of the number of steps made
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1


def torch_adamw(
    params: Iterable[Tensor], hyper: HyperParameters
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Return torch's optimizer, and the scheduler of its learning rate."""
    # The base rate is 1, so that the scheduler's product is exactly the schedule's value.
    optimizer = torch.optim.AdamW(
        params, lr=1.0, betas=hyper.betas, weight_decay=hyper.weight_decay, foreach=False
    )
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, hyper.learning_rate)


class FrontEnd(ABC):
    """Way to step a model in the training loop; by default, all-reduces gradients at each step."""

    def step(self) -> None:  # noqa: B027  a hook has stepped
        """Do the rest of a step, after each backward."""

    def finish(self) -> None:  # noqa: B027  most ranks have equal models
        """Make the models of all ranks equal, after the last step."""

    @abstractmethod
    def state_bytes(self) -> int:
        """Return the memory of this rank's optimizer state."""

    def sent_bytes(self, reduced: float, steps: int) -> float:
        """Return the bytes that this rank has sent to other hosts.

        Args:
            reduced: bytes that a rank sends for an all-reduce of all gradients.
            steps: number of steps so far.
        """
        return reduced * steps


class StepHook(FrontEnd):
    """AdamW of functional_optim, which steps each bucket during DDP's backward."""

    def __init__(self, ddp: DistributedDataParallel, hyper: HyperParameters) -> None:
        optimizer = adamw(
            lr=hyper.learning_rate, betas=hyper.betas, weight_decay=hyper.weight_decay
        )
        self._optimizer_state = step_hook(ddp, optimizer)

    def state_bytes(self) -> int:
        leaves = optree.tree_leaves(self._optimizer_state.state.leaves)
        return tensor_bytes(leaf for leaf in leaves if isinstance(leaf, Tensor))


class TorchAdamW(FrontEnd):
    """torch.optim.AdamW after DDP's backward, with a scheduler."""

    def __init__(self, ddp: DistributedDataParallel, hyper: HyperParameters) -> None:
        self._optimizer, self._scheduler = torch_adamw(ddp.parameters(), hyper)
        # DDP without a hook multiplies by 1 / ranks, and its all-reduce hook divides by ranks.
        # For 3 ranks these differ in the last bit, so all runs divide.
        ddp.register_comm_hook(None, allreduce_hook)

    def step(self) -> None:
        self._optimizer.step()
        self._scheduler.step()

    def state_bytes(self) -> int:
        return state_bytes(self._optimizer)


class ZeroStepHook(FrontEnd):
    """AdamW with sharded state, stepped during backward.

    Each gradient is reduced to the rank that owns it, and parameters are gathered from their
    owners.
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
        """Set the learning rate of the next step; the hook has made this step."""
        self._scheduler.step()

    def state_bytes(self) -> int:
        return state_bytes(self._zero.optim)


class LocalSGD(FrontEnd):
    """AdamW on each rank's own gradients, with a mean of parameters every ``period`` steps."""

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
        self._optimizer.step()
        self._scheduler.step()

    def finish(self) -> None:
        """Average once more, without counting the bytes."""
        ScheduledModelAverager(AveragingSchedule(1)).average_parameters(self._params)

    def state_bytes(self) -> int:
        return state_bytes(self._optimizer)

    def sent_bytes(self, reduced: float, steps: int) -> float:
        # Gradients in the first steps, then parameters.
        return reduced * min(steps, WARMUP) + self._averager.bytes_sent


WARMUP = 4
"""Number of steps with averaged gradients, before local SGD starts."""

LOSS_SPREAD = 0.001
"""Largest relative difference from A's validation loss for another order of sums.

Rounding alone causes about a thousandth of this, for 3 ranks and 400 steps.
"""

LOCAL_SPREAD = 0.1
"""The same for local SGD that averages every 16 steps."""


class ComparedRun(NamedTuple):
    """Run that is compared with others."""

    name: str
    """A letter, for tables."""
    title: str
    """The optimizer, for tables."""
    build: Callable[..., Any]
    """Builds a front-end from (ddp, hyper); for RPC, a run from (spec, model, hyper)."""
    exact: bool
    """True if the run must equal the first bit for bit: equal sums in equal order."""
    spread: float = LOSS_SPREAD
    """If not exact: the largest relative difference of the last validation losses."""
    differs: str = ""
    """Why the run is not exact."""


def _step_hook(ranks: int) -> list[ComparedRun]:
    """Return runs with all-reduced gradients (A, B), and with sums in rank order (C).

    For up to two ranks, both orders give equal sums.
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
    """Return a DDP run, and local SGD with frequent and with rare averages."""
    runs = [ComparedRun("A", "torch.optim.AdamW, after DDP", TorchAdamW, exact=True)]
    for name, period in (("B", 4), ("C", 16)):
        build = partial(LocalSGD, period=period)
        title = f"local SGD, a mean of parameters every {period} steps"
        why = f"steps each rank by its own gradients, and averages every {period} steps"
        runs.append(ComparedRun(name, title, build, exact=False, spread=LOCAL_SPREAD, differs=why))
    return runs


FRONT_ENDS: Mapping[str, Callable[[int], list[ComparedRun]]] = {
    "step-hook": _step_hook,
    "local-sgd": _local_sgd,
}
"""By the name of ``--front-end``: the runs to compare, for a number of ranks."""


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the memory of the tensors in an optimizer's ``state``."""
    return tensor_bytes(
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the memory of the storages of these tensors, each counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
