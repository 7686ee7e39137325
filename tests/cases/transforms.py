"""Cases of chains with transforms and wrappers that do not belong to an algorithm."""

import math
from typing import Any

from hypothesis import strategies as st

from functional_optim import algorithms
from functional_optim.algorithms.adam import scale_by_adam
from functional_optim.algorithms.lion import scale_by_lion
from functional_optim.composition import chain
from functional_optim.optimizer import Optimizer
from functional_optim.transforms import (
    adaptive_grad_clip,
    add_noise,
    cautious_weight_decay,
    centralize,
    clip_by_block_rms,
    descend,
    mars,
    maximized,
)
from functional_optim.wrappers.constrain_norm import constrain_norm
from functional_optim.wrappers.outer_nesterov import outer_nesterov
from functional_optim.wrappers.qk_clip import qk_clip
from functional_optim.wrappers.swa import swa
from functional_optim.wrappers.tail_ema import tail_ema

from .case import BETAS, DECAY, FLAG, LR, Case, some


def _clipped_rms(lr: float = 0.1, threshold: float = 1.0) -> Optimizer:
    return chain(scale_by_adam(), clip_by_block_rms(threshold), descend(lr))


def _centralized(lr: float = 0.1, **options: Any) -> Optimizer:
    return chain(centralize(), algorithms.sgd(lr, momentum=0.9, **options))


def _units(lr: float = 0.1, **options: Any) -> Optimizer:
    return chain(adaptive_grad_clip(**options), algorithms.adamw(lr))


def _cautious_decay(
    lr: float = 0.1, weight_decay: float = 0.1, *, maximize: bool = False, **options: Any
) -> Optimizer:
    decay = cautious_weight_decay(weight_decay)
    return chain(maximized(maximize), scale_by_lion(**options), decay, descend(lr))


def _mars(lr: float = 0.1, *, lion: bool = False, **options: Any) -> Optimizer:
    return chain(mars(**options), algorithms.lion(lr) if lion else algorithms.adamw(lr))


def _noisy(lr: float = 0.1, **options: Any) -> Optimizer:
    return chain(add_noise(**options), algorithms.sgd(lr, momentum=0.9))


def _norm_kept(lr: float = 0.1, radius: float | None = None, *, rows: bool = False) -> Optimizer:
    return chain(algorithms.sgd(lr, momentum=0.9), constrain_norm(radius, rows=rows))


def _averaged(lr: float = 0.1, start: int = 2, every: int = 1) -> Optimizer:
    return chain(algorithms.adamw(lr), swa(start, every))


def _tail_averaged(lr: float = 0.1, decay: float = 0.5, start: int = 2) -> Optimizer:
    return chain(algorithms.sgd(lr), tail_ema(decay, start))


def _outer(lr: float = 0.1, **options: Any) -> Optimizer:
    return chain(algorithms.adamw(lr), outer_nesterov(**{"every": 2, **options}))


def _qk_clipped(lr: float = 0.1, **options: Any) -> Optimizer:
    return chain(algorithms.sgd(lr, momentum=0.9), qk_clip(**options))


TRANSFORM_CASES: dict[str, Case] = {
    "scale_by_adam, clip_by_block_rms, descend": Case(
        _clipped_rms, options=some(lr=LR, threshold=st.sampled_from([0.3, 1.0, math.inf]))
    ),
    "centralize, sgd": Case(_centralized, options=some(lr=LR, weight_decay=DECAY, nesterov=FLAG)),
    "adaptive_grad_clip, adamw": Case(
        _units,
        options=some(
            lr=LR,
            clipping=st.sampled_from([0.0, 0.01, 1.0, math.inf]),
            eps=st.sampled_from([0.0, 1e-3, 1.0]),
        ),
    ),
    "scale_by_lion, cautious_weight_decay, descend": Case(
        _cautious_decay, options=some(lr=LR, weight_decay=DECAY, betas=BETAS, maximize=FLAG)
    ),
    "mars, adamw or lion": Case(
        _mars,
        options=some(
            lr=LR,
            lion=FLAG,
            beta=st.sampled_from([0.0, 0.5, 0.95]),
            gamma=st.sampled_from([0.0, 0.025, 1.0]),
            max_norm=st.sampled_from([0.5, 1.0, math.inf]),
            from_zero=FLAG,
        ),
    ),
    "add_noise, sgd": Case(
        _noisy,
        options=some(
            lr=LR,
            eta=st.sampled_from([0.0, 0.3]),
            gamma=st.sampled_from([0.0, 0.55]),
            seed=st.sampled_from([0, 7, 2**24 - 1]),
        ),
    ),
    "sgd, constrain_norm": Case(
        _norm_kept, options=some(lr=LR, radius=st.sampled_from([None, 0.5, 3.0]), rows=FLAG)
    ),
    "adamw, swa": Case(
        _averaged,
        options=some(lr=LR, start=st.sampled_from([1, 2, 4]), every=st.sampled_from([1, 2, 3])),
    ),
    "sgd, tail_ema": Case(
        _tail_averaged,
        options=some(lr=LR, decay=st.sampled_from([0.0, 0.9]), start=st.sampled_from([0, 1, 3])),
    ),
    "adamw, outer_nesterov": Case(
        _outer,
        options=some(
            lr=LR,
            every=st.sampled_from([1, 2, 3]),
            outer_lr=st.sampled_from([0.0, 0.7, 1.0]),
            outer_momentum=st.sampled_from([0.0, 0.9]),
        ),
    ),
}
"""Chains by name, each with one of these transforms or wrappers."""

TRANSFORM_INPUT_CASES: dict[str, Case] = {
    "sgd, qk_clip": Case(
        _qk_clipped,
        options=some(
            lr=LR, tau=st.sampled_from([0.1, 1.0, 100.0]), exponent=st.sampled_from([0.0, 0.5, 1.0])
        ),
        one_chain=False,
    )
}
"""Chains with a stage that has inputs per leaf."""
