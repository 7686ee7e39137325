"""DDP communication hooks, and training that averages parameters instead of gradients.

A ``hooks.py`` or ``sharding.py`` in the folder of your script hides this package or the package
``sharding``, because Python searches that folder first: give your file another name.
"""

from functional_optim.engine.messages import require_package

require_package("sharding")

from hooks.averaging import (
    AveragingSchedule,
    HierarchicalModelAverager,
    ModelAverager,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    PostLocalSGDState,
    ScheduledModelAverager,
    post_localSGD_hook,
)
from hooks.in_backward import apply_optimizer_in_backward
from hooks.optimizer_state import OptimizerState
from hooks.step_hook import step_hook
from hooks.zero.hook_with_zero_step import hook_with_zero_step, hook_with_zero_step_interleaved
from hooks.zero.step_hook import zero_step_hook
from hooks.zero.zero_hook import ZeroHook

__all__ = [
    "AveragingSchedule",
    "HierarchicalModelAverager",
    "ModelAverager",
    "OptimizerState",
    "PeriodicModelAverager",
    "PostLocalSGDOptimizer",
    "PostLocalSGDState",
    "ScheduledModelAverager",
    "ZeroHook",
    "apply_optimizer_in_backward",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
    "post_localSGD_hook",
    "step_hook",
    "zero_step_hook",
]
