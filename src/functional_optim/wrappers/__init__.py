"""Stages around an optimizer: gates, averages of parameters, and slow parameters."""

from functional_optim.core.constructor import register_link_constructors
from functional_optim.wrappers.accumulate import accumulate
from functional_optim.wrappers.apply_if_finite import apply_if_finite
from functional_optim.wrappers.constrain_norm import constrain_norm
from functional_optim.wrappers.ema import ema
from functional_optim.wrappers.lookahead import lookahead
from functional_optim.wrappers.outer_nesterov import outer_nesterov
from functional_optim.wrappers.qk_clip import qk_clip
from functional_optim.wrappers.sam import sam
from functional_optim.wrappers.swa import swa
from functional_optim.wrappers.tail_ema import tail_ema

__all__ = [
    "accumulate",
    "apply_if_finite",
    "constrain_norm",
    "ema",
    "lookahead",
    "outer_nesterov",
    "qk_clip",
    "sam",
    "swa",
    "tail_ema",
]

register_link_constructors(*(globals()[name] for name in __all__))
