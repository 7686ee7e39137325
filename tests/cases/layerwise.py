"""Cases of algorithms with one step size per tensor, per block of a tensor, or for all tensors."""

from hypothesis import strategies as st

from functional_optim import algorithms

from .case import (
    BAD_LR,
    BETAS,
    DECAY,
    EPS,
    FLAG,
    LR,
    NAN,
    NAN_LR,
    Case,
    bad_values,
    some,
)

_BAD_LR = (*BAD_LR, *NAN_LR)
_BAD_DECAY = bad_values(weight_decay=[-1.0, NAN])
_BAD_EPS = bad_values(eps=[-1.0, NAN])
_BAD_BETAS = bad_values(betas=[(1.0, 0.9), (0.9, 1.0), (NAN, 0.9)])
_BAD_FOUND = bad_values(d0=[0.0, NAN], growth_rate=[0.5, NAN])
_FACTOR = st.sampled_from([0.0, 0.5, 1.0])
_FOUND = {"d0": st.sampled_from([1e-6, 0.1]), "growth_rate": st.sampled_from([1.0, 1.5])}
_DOG = some(
    lr=_FACTOR, reps_rel=st.sampled_from([1e-6, 0.1]), eps=EPS, weight_decay=DECAY, maximize=FLAG
)
_BAD_DOG = (*_BAD_LR, *_BAD_DECAY, *_BAD_EPS, *bad_values(reps_rel=[0.0, NAN]))

LAYERWISE_CASES: dict[str, Case] = {
    "sign_sgd": Case(
        algorithms.sign_sgd,
        options=some(lr=LR, weight_decay=DECAY, decoupled_weight_decay=FLAG, maximize=FLAG),
        refused_here=(*_BAD_LR, *_BAD_DECAY),
    ),
    "signum": Case(
        algorithms.signum,
        options=some(
            lr=LR,
            momentum=st.sampled_from([0.0, 0.5]),
            weight_decay=DECAY,
            decoupled_weight_decay=FLAG,
            maximize=FLAG,
        ),
        refused_here=(*_BAD_LR, *_BAD_DECAY, *bad_values(momentum=[1.0, NAN])),
    ),
    "novograd": Case(
        algorithms.novograd,
        options=some(
            lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, grad_averaging=FLAG, maximize=FLAG
        ),
        refused_here=(*_BAD_LR, *_BAD_BETAS, *_BAD_EPS, *_BAD_DECAY),
    ),
    "came": Case(
        algorithms.came,
        options=some(
            lr=LR,
            betas=st.sampled_from([(0.9, 0.999, 0.9999), (0.0, 0.5, 0.9), (0.8, 0.0, 0.0)]),
            eps=st.sampled_from([(1e-30, 1e-16), (1e-3, 1e-2)]),
            clip_threshold=st.sampled_from([0.5, 2.0]),
            weight_decay=DECAY,
            maximize=FLAG,
        ),
        refused_here=(
            *_BAD_LR,
            *_BAD_DECAY,
            *bad_values(
                betas=[(1.0, 0.9, 0.9), (0.9, 0.9, NAN)],
                eps=[(-1.0, 1e-16), (1e-30, NAN)],
                clip_threshold=[0.0, NAN],
            ),
        ),
    ),
    "adam_mini": Case(
        algorithms.adam_mini,
        options=some(
            lr=LR,
            betas=BETAS,
            eps=EPS,
            weight_decay=DECAY,
            blocks=st.sampled_from([0, 1]),
            maximize=FLAG,
        ),
        refused_here=(*_BAD_LR, *_BAD_BETAS, *_BAD_EPS, *_BAD_DECAY, *bad_values(blocks=[-1])),
    ),
    "dog": Case(algorithms.dog, options=_DOG, refused_here=_BAD_DOG, one_chain=False),
    "ldog": Case(algorithms.ldog, options=_DOG, refused_here=_BAD_DOG),
    "dadapt_sgd": Case(
        algorithms.dadapt_sgd,
        options=some(
            lr=_FACTOR,
            momentum=st.sampled_from([0.0, 0.5]),
            weight_decay=DECAY,
            maximize=FLAG,
            **_FOUND,
        ),
        refused_here=(*_BAD_LR, *_BAD_DECAY, *_BAD_FOUND, *bad_values(momentum=[1.0, NAN])),
        one_chain=False,
    ),
    "dadapt_adam": Case(
        algorithms.dadapt_adam,
        options=some(
            lr=_FACTOR,
            betas=BETAS,
            eps=EPS,
            weight_decay=DECAY,
            decouple=FLAG,
            use_bias_correction=FLAG,
            maximize=FLAG,
            **_FOUND,
        ),
        refused_here=(
            *_BAD_LR,
            *_BAD_BETAS,
            *_BAD_EPS,
            *_BAD_DECAY,
            *_BAD_FOUND,
            *bad_values(eps=[0.0]),
        ),
        one_chain=False,
    ),
}
"""One case per algorithm, by the name of its constructor."""
