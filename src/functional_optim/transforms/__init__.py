"""Stages that any chain may have: one file each.

Those that are a part of an algorithm (``scale_by_adam``, ``scale_by_rms``, ``scale_by_lion`` and
``trace``) stand in its file, beside the mathematics that they share with it.
"""

from functional_optim.core.constructor import links_constructors
from functional_optim.transforms.cautious import cautious
from functional_optim.transforms.clip_by_global_norm import clip_by_global_norm
from functional_optim.transforms.clip_by_value import clip_by_value
from functional_optim.transforms.decoupled_weight_decay import decoupled_weight_decay
from functional_optim.transforms.descend import descend
from functional_optim.transforms.maximize import maximized
from functional_optim.transforms.scale_by_sign import scale_by_sign
from functional_optim.transforms.scale_by_trust_ratio import scale_by_trust_ratio
from functional_optim.transforms.weight_decay import weight_decay

__all__ = [
    "cautious",
    "clip_by_global_norm",
    "clip_by_value",
    "decoupled_weight_decay",
    "descend",
    "maximized",
    "scale_by_sign",
    "scale_by_trust_ratio",
    "weight_decay",
]

links_constructors(
    cautious,
    clip_by_global_norm,
    clip_by_value,
    decoupled_weight_decay,
    descend,
    maximized,
    scale_by_sign,
    scale_by_trust_ratio,
    weight_decay,
)
