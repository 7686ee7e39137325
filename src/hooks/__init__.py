"""DDP communication hooks: when the parameters of a bucket are stepped."""

from hooks.optimizer_state import OptimizerState
from hooks.step_hook import step_hook

__all__ = ["OptimizerState", "step_hook"]
