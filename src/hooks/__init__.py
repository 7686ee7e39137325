"""DDP communication hooks: when the parameters of a bucket are stepped."""

from hooks.in_backward import apply_optimizer_in_backward
from hooks.optimizer_state import OptimizerState
from hooks.step_hook import step_hook

__all__ = ["OptimizerState", "apply_optimizer_in_backward", "step_hook"]
