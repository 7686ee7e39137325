"""Stages to put before a rule: one file each."""

from functional_optim.transforms.clip_by_global_norm import clip_by_global_norm
from functional_optim.transforms.clip_by_value import clip_by_value
from functional_optim.transforms.decoupled_weight_decay import decoupled_weight_decay
from functional_optim.transforms.maximize import maximized
from functional_optim.transforms.weight_decay import weight_decay

__all__ = [
    "clip_by_global_norm",
    "clip_by_value",
    "decoupled_weight_decay",
    "maximized",
    "weight_decay",
]
