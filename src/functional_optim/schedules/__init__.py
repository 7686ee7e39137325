"""Schedules as values that can be compared, hashed, pickled and printed, one file each."""

from functional_optim.core.on_global_step import on_global_step
from functional_optim.schedules.constant import constant
from functional_optim.schedules.cosine import cosine
from functional_optim.schedules.exponential import exponential
from functional_optim.schedules.inverse_sqrt import inverse_sqrt
from functional_optim.schedules.joined import joined
from functional_optim.schedules.linear import linear
from functional_optim.schedules.one_cycle import one_cycle
from functional_optim.schedules.polynomial import polynomial
from functional_optim.schedules.warmup import warmup
from functional_optim.schedules.warmup_stable_decay import warmup_stable_decay

__all__ = [
    "constant",
    "cosine",
    "exponential",
    "inverse_sqrt",
    "joined",
    "linear",
    "on_global_step",
    "one_cycle",
    "polynomial",
    "warmup",
    "warmup_stable_decay",
]
