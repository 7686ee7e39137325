"""Stages for any chain, one file each.

Transforms that are part of an algorithm (``scale_by_adam``, ``scale_by_rms``, ``scale_by_lion`` and
``trace``) are in the file of the algorithm, with the mathematics that they share.
"""

from functional_optim.core.constructor import register_link_constructors
from functional_optim.transforms.adaptive_grad_clip import adaptive_grad_clip
from functional_optim.transforms.add_noise import add_noise
from functional_optim.transforms.cautious import cautious
from functional_optim.transforms.cautious_weight_decay import cautious_weight_decay
from functional_optim.transforms.centralize import centralize
from functional_optim.transforms.clip_by_block_rms import clip_by_block_rms
from functional_optim.transforms.clip_by_global_norm import clip_by_global_norm
from functional_optim.transforms.clip_by_value import clip_by_value
from functional_optim.transforms.decoupled_weight_decay import decoupled_weight_decay
from functional_optim.transforms.descend import descend
from functional_optim.transforms.mars import mars
from functional_optim.transforms.maximize import maximized
from functional_optim.transforms.scale_by_sign import scale_by_sign
from functional_optim.transforms.scale_by_trust_ratio import scale_by_trust_ratio
from functional_optim.transforms.weight_decay import weight_decay

__all__ = [
    "adaptive_grad_clip",
    "add_noise",
    "cautious",
    "cautious_weight_decay",
    "centralize",
    "clip_by_block_rms",
    "clip_by_global_norm",
    "clip_by_value",
    "decoupled_weight_decay",
    "descend",
    "mars",
    "maximized",
    "scale_by_sign",
    "scale_by_trust_ratio",
    "weight_decay",
]

register_link_constructors(*(globals()[name] for name in __all__))
