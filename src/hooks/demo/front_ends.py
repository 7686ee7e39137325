"""Front-ends that the demo compares: ways to step a DDP model."""

from collections.abc import Callable, Mapping
from functools import partial

import optree
import torch
from torch import Tensor, nn
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
from hooks.demo.run import ComparedRun, DemoRun, HyperParameters, state_bytes, tensor_bytes
from sharding import ZeroRedundancyOptimizer


class StepHook(DemoRun):
    """AdamW of functional_optim, which steps each bucket during DDP's backward."""

    def __init__(self, spec: ComparedRun, model: nn.Module, hyper: HyperParameters) -> None:
        super().__init__(spec, model)
        optimizer = adamw(
            lr=hyper.learning_rate, betas=hyper.betas, weight_decay=hyper.weight_decay
        )
        self._optimizer_state = step_hook(_ddp(self), optimizer)

    def state_bytes(self) -> int:
        leaves = optree.tree_leaves(self._optimizer_state.state.leaves)
        return tensor_bytes(leaf for leaf in leaves if isinstance(leaf, Tensor))


class TorchAdamW(DemoRun):
    """torch.optim.AdamW after backward, with a scheduler."""

    def __init__(
        self,
        spec: ComparedRun,
        model: nn.Module,
        hyper: HyperParameters,
        *,
        under_ddp: bool = True,
    ) -> None:
        super().__init__(spec, model, under_ddp=under_ddp)
        # The base rate is 1, so that the scheduler's product is exactly the schedule's value.
        self._optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=1.0,
            betas=hyper.betas,
            weight_decay=hyper.weight_decay,
            foreach=False,
        )
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(self._optimizer, hyper.learning_rate)
        if under_ddp:
            # DDP without a hook multiplies by 1 / ranks, and its all-reduce hook divides by ranks.
            # For 3 ranks these differ in the last bit, so all runs divide.
            _ddp(self).register_comm_hook(None, allreduce_hook)

    def finish_step(self) -> None:
        self._optimizer.step()
        self._scheduler.step()

    def state_bytes(self) -> int:
        return state_bytes(self._optimizer)


class ZeroStepHook(DemoRun):
    """AdamW with sharded state, stepped during backward.

    Each gradient is reduced to the rank that owns it, and parameters are gathered from their
    owners.
    """

    def __init__(self, spec: ComparedRun, model: nn.Module, hyper: HyperParameters) -> None:
        super().__init__(spec, model)
        self._zero = ZeroRedundancyOptimizer(
            model.parameters(),
            torch.optim.AdamW,
            overlap_with_ddp=True,
            policy="elements",
            lr=1.0,
            betas=hyper.betas,
            weight_decay=hyper.weight_decay,
        )
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(self._zero, hyper.learning_rate)
        _ddp(self).register_comm_hook(None, zero_step_hook(_ddp(self), self._zero))

    def finish_step(self) -> None:
        """Set the learning rate of the next step; the hook has made this step."""
        self._scheduler.step()

    def state_bytes(self) -> int:
        return state_bytes(self._zero.optim)


class LocalSGD(DemoRun):
    """AdamW on each rank's own gradients, with a mean of parameters every ``period`` steps."""

    def __init__(
        self, spec: ComparedRun, model: nn.Module, hyper: HyperParameters, *, period: int
    ) -> None:
        super().__init__(spec, model)
        schedule = AveragingSchedule(period, warmup=WARMUP)
        state = PostLocalSGDState.from_schedule(schedule, post_local_gradient_allreduce=False)
        _ddp(self).register_comm_hook(state, post_localSGD_hook)
        inner = torch.optim.AdamW(
            model.parameters(), lr=1.0, betas=hyper.betas, weight_decay=hyper.weight_decay
        )
        self._averager = ScheduledModelAverager(schedule)
        self._optimizer = PostLocalSGDOptimizer(inner, self._averager)
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(self._optimizer, hyper.learning_rate)

    def finish_step(self) -> None:
        self._optimizer.step()
        self._scheduler.step()

    def finish(self) -> None:
        """Average once more, without counting the bytes."""
        ScheduledModelAverager(AveragingSchedule(1)).average_parameters(self.parameters())

    def state_bytes(self) -> int:
        return state_bytes(self._optimizer)

    def sent_bytes(self, reduced: float, steps: int) -> float:
        # Gradients in the first steps, then parameters.
        return reduced * min(steps, WARMUP) + self._averager.bytes_sent


def _ddp(run: DemoRun) -> DistributedDataParallel:
    assert isinstance(run.model, DistributedDataParallel), "the run is under DDP"
    return run.model


WARMUP = 4
"""Number of steps with averaged gradients, before local SGD starts."""

LOCAL_SPREAD = 0.1
"""Largest relative difference from A's validation loss for local SGD that averages every 16 steps.
"""


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
