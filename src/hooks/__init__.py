"""DDP communication hooks: when the parameters of a bucket are stepped."""

from hooks.in_backward import apply_optimizer_in_backward
from hooks.optimizer_state import OptimizerState
from hooks.step_hook import step_hook
from hooks.zero.step_hook import zero_step_hook
from hooks.zero.with_hook import (
    ZeroHook,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)

__all__ = [
    "OptimizerState",
    "ZeroHook",
    "apply_optimizer_in_backward",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
    "step_hook",
    "zero_step_hook",
]
