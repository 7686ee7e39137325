"""Named tuples of Prodigy: state, hyper-parameters, shared scalars and coefficients."""

from typing import NamedTuple

import torch
from torch import Tensor


class ProdigyState(NamedTuple):
    s: Tensor  # for every slice_p-th element: of the parameter's dtype, and its shape or flat
    p0: Tensor  # the same elements of the first parameter, in the same shape
    exp_avg: list[Tensor]  # [m] of the parameter's shape and dtype; [] if b1 is 0
    exp_avg_sq: Tensor  # v, the same


class ProdigyHyper(NamedTuple):
    lr: float  # a factor of the step size that is found
    betas: tuple[float, float]  # b1, b2: decay of m and of v
    beta3: float  # b3: decay of r and of s
    eps: float
    weight_decay: float
    decouple: bool  # True if the decay shrinks the parameter; else it is added to the gradient
    use_bias_correction: bool
    safeguard_warmup: bool  # True if s grows by d_{t-1}^2 / d_0 * g, without lr
    d0: float  # the first d
    d_coef: float  # k
    growth_rate: float
    slice_p: int  # r and s are computed from every slice_p-th element


class ProdigyShared(NamedTuple):
    d: float  # of the next step
    d_max: float  # the largest d_hat so far, or d0 if that is larger
    d_numerator: float  # r
    d_denom: float  # sum |s| at the last step; 0 if that step moved nothing
    d_hat: float  # e, of the last step that moved anything
    k: float  # number of steps that have moved anything
    d_used: float  # by the last step


class ProdigyCoefficients(NamedTuple):
    next_addend: float  # factor of sum g * (p_0 - p) at the next step
    next_weight: float  # of g in s, at the next step
    weight: float  # of g in s
    beta_1: float
    weight_1: float  # d * (1 - b1)
    beta_2: float
    weight_2: float  # d^2 * (1 - b2)
    beta_3: float
    eps: float  # d_t * eps
    step_size: float  # -l_t, or -l_t * d_t without m
    added_decay: float  # of the parameter to the gradient
    decay: float  # -l_t * weight_decay
    slice_p: int
    slices: bool  # True if slice_p > 1
    averages: bool  # True if there is m
    adds_decay: bool
    decays: bool
    is_active: bool  # True if lr is not 0
    moves: bool  # True if any gradient is not 0


torch.serialization.add_safe_globals(
    [
        (one, f"functional_optim.algorithms.prodigy.{one.__name__}")
        for one in (ProdigyState, ProdigyShared)
    ]
)
"""Checkpoints of earlier versions name these classes as parts of module ``prodigy``."""
