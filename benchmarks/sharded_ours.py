"""Sharded training by this package: a step after backward, and hooks that step during backward."""

from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.optim import AdamW

from benchmarks import sharded as who
from benchmarks.sharded_models import Task
from benchmarks.sharded_peers import Builder, Contestant, trained, wrapped
from hooks import hook_with_zero_step, zero_step_hook
from sharding import ZeroRedundancyOptimizer


def zero(params: Any, policy: str, **options: Any) -> ZeroRedundancyOptimizer:
    """Return our optimizer over these parameters."""
    return ZeroRedundancyOptimizer(
        params, AdamW, parameters_as_bucket_view=True, policy=policy, **who.OPTIONS, **options
    )


def _step(task: Task, policy: str, **options: Any) -> Contestant:
    module = wrapped(task, views=True)
    optimizer = zero(module.parameters(), policy, **options)
    return trained(module, task, optimizer, optimizer.step)


def _as_constructed(task: Task) -> Contestant:
    """Build the contestant that users get if they change only the import."""
    module = wrapped(task, views=False)
    optimizer = ZeroRedundancyOptimizer(module.parameters(), AdamW, **who.OPTIONS)
    return trained(module, task, optimizer, optimizer.step)


def _nothing() -> None:
    """Do nothing, because the hook has stepped already."""


def _zero_step_hook(task: Task, policy: str) -> Contestant:
    module = wrapped(task, views=True)
    optimizer = zero(module.parameters(), policy, fused=True, overlap_with_ddp=True)
    module.register_comm_hook(None, zero_step_hook(module, optimizer))
    return trained(module, task, optimizer, _nothing)


def _hook_with_zero_step(task: Task, policy: str) -> Contestant:
    module = wrapped(task, views=True)
    optimizer = zero(module.parameters(), policy, fused=True, overlap_with_ddp=True)
    module.register_comm_hook(None, hook_with_zero_step(allreduce_hook, module, optimizer))
    return trained(module, task, optimizer, _nothing)


BUILDERS: dict[str, Builder] = {
    who.STEP_DEFAULT: _as_constructed,
    who.STEP_GREEDY: lambda task: _step(task, "greedy"),
    who.STEP_GREEDY_FUSED: lambda task: _step(task, "greedy", fused=True),
    who.STEP_ELEMENTS: lambda task: _step(task, "elements"),
    who.STEP_ELEMENTS_FUSED: lambda task: _step(task, "elements", fused=True),
    who.HOOK_ELEMENTS: lambda task: _zero_step_hook(task, "elements"),
    who.HOOK_GREEDY: lambda task: _zero_step_hook(task, "greedy"),
    who.HOOK_SLICED: lambda task: _zero_step_hook(task, "sliced"),
    who.WITH_HOOK: lambda task: _hook_with_zero_step(task, "elements"),
}
