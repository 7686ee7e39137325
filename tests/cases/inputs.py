"""Cases of algorithms with inputs per leaf. The laws compute the inputs from the gradients."""

from typing import Any

from hypothesis import strategies as st

from functional_optim import algorithms
from functional_optim.algorithms.adahessian import scale_by_adahessian
from functional_optim.algorithms.sophia import scale_by_sophia
from functional_optim.composition import chain, partition
from functional_optim.optimizer import Optimizer
from functional_optim.transforms import clip_by_global_norm, clip_by_value, descend

from .case import BETAS, DECAY, EPS, FLAG, LR, NAN, Case, bad_values, some
from .chains import label_by_name
from .transforms import TRANSFORM_INPUT_CASES

_GAMMA = st.sampled_from([0.01, 1.0, 30.0])


def _clipped(lr: float = 0.1, **options: Any) -> Optimizer:
    return chain(
        clip_by_value(2.0), scale_by_adahessian(**options), clip_by_global_norm(1.0), descend(lr)
    )


def _parts(lr: float = 0.1, gamma: float = 1.0) -> Optimizer:
    others = chain(scale_by_sophia(gamma=gamma), descend(lr))
    return partition({"first": algorithms.adamw(lr=lr), "others": others}, label_by_name)


INPUT_CASES: dict[str, Case] = {
    "sophia": Case(
        algorithms.sophia,
        options=some(lr=LR, betas=BETAS, gamma=_GAMMA, eps=EPS, weight_decay=DECAY),
        refused_here=bad_values(
            lr=[-0.1, NAN],
            betas=[(1.0, 0.9), (0.9, NAN)],
            gamma=[-1.0, NAN],
            eps=[-1.0],
            weight_decay=[-1.0],
        ),
        one_chain=False,
    ),
    "adahessian": Case(
        algorithms.adahessian,
        options=some(
            lr=LR,
            betas=BETAS,
            eps=EPS,
            weight_decay=DECAY,
            hessian_power=st.sampled_from([0.0, 0.5, 1.0]),
            maximize=FLAG,
        ),
        refused_here=bad_values(
            lr=[-0.1, NAN],
            betas=[(1.0, 0.9)],
            eps=[NAN],
            weight_decay=[-1.0],
            hessian_power=[1.5, -0.5],
        ),
        one_chain=False,
    ),
    "clip_by_value, scale_by_adahessian, clip_by_global_norm, descend": Case(
        _clipped, options=some(lr=LR, betas=BETAS), one_chain=False
    ),
    "partition of adamw and scale_by_sophia with descend": Case(
        _parts, options=some(lr=LR, gamma=_GAMMA), one_chain=False
    ),
    **TRANSFORM_INPUT_CASES,
}
"""Cases by name."""
