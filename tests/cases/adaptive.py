"""Cases of adaptive algorithms that torch.optim does not have.

The options include the ends of each range, where a formula may divide by 0.
"""

from typing import Any

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

TRIPLES = st.sampled_from([(0.9, 0.999, 0.99), (0.0, 0.5, 0.9), (0.8, 0.0, 0.0)])
_BAD: tuple[dict[str, Any], ...] = (
    *BAD_LR,
    *NAN_LR,
    *bad_values(eps=[-1.0, NAN], weight_decay=[-1.0]),
)
_BAD_PAIR: tuple[dict[str, Any], ...] = (
    *_BAD,
    *bad_values(betas=[(1.0, 0.9), (0.9, 1.0), (NAN, 0.9)]),
)
_BAD_TRIPLE: tuple[dict[str, Any], ...] = (
    *_BAD,
    *bad_values(betas=[(1.0, 0.9, 0.9), (0.9, NAN, 0.9), (0.9, 0.9, 1.0)]),
)
_OF_ALL = {"lr": LR, "eps": EPS, "weight_decay": DECAY, "maximize": FLAG}

ADAPTIVE_CASES: dict[str, Case] = {
    "ademamix": Case(
        algorithms.ademamix,
        options=some(
            **_OF_ALL,
            betas=TRIPLES,
            alpha=st.sampled_from([0.0, 2.0]),
            alpha_warmup=st.sampled_from([0, 2, 100]),
            beta3_warmup=st.sampled_from([0, 2, 100]),
        ),
        refused_here=(
            *_BAD_TRIPLE,
            *bad_values(alpha=[-1.0, NAN], alpha_warmup=[-1], beta3_warmup=[-1]),
        ),
    ),
    "adopt": Case(
        algorithms.adopt,
        options=some(
            **_OF_ALL,
            betas=BETAS,
            decouple=FLAG,
            clip=FLAG,
            clip_power=st.sampled_from([0.0, 0.25]),
        ),
        refused_here=(*_BAD_PAIR, *bad_values(clip_power=[-1.0, NAN])),
    ),
    "adan": Case(
        algorithms.adan,
        options=some(**_OF_ALL, betas=TRIPLES, no_prox=FLAG),
        refused_here=_BAD_TRIPLE,
    ),
    "adabelief": Case(
        algorithms.adabelief,
        options=some(
            **{**_OF_ALL, "eps": st.sampled_from([1e-8, 1e-3])},
            betas=BETAS,
            amsgrad=FLAG,
            decoupled_weight_decay=FLAG,
        ),
        refused_here=_BAD_PAIR,
    ),
    "yogi": Case(
        algorithms.yogi,
        options=some(
            **_OF_ALL,
            betas=BETAS,
            initial_accumulator_value=st.sampled_from([0.0, 0.3]),
            bias_correction=FLAG,
        ),
        refused_here=(*_BAD_PAIR, *bad_values(initial_accumulator_value=[-1.0, NAN])),
    ),
    "laprop": Case(algorithms.laprop, options=some(**_OF_ALL, betas=BETAS), refused_here=_BAD_PAIR),
    "stable_adamw": Case(
        algorithms.stable_adamw, options=some(**_OF_ALL, betas=BETAS), refused_here=_BAD_PAIR
    ),
    "qhadam": Case(
        algorithms.qhadam,
        options=some(
            **_OF_ALL,
            betas=BETAS,
            nus=st.sampled_from([(0.7, 1.0), (1.0, 0.5), (0.0, 0.0)]),
            decoupled_weight_decay=FLAG,
        ),
        refused_here=(*_BAD_PAIR, *bad_values(nus=[(1.5, 1.0), (0.5, -0.1), (NAN, 1.0)])),
    ),
    "adabound": Case(
        algorithms.adabound,
        options=some(
            **_OF_ALL,
            betas=BETAS,
            final_lr=st.sampled_from([0.0, 0.1]),
            gamma=st.sampled_from([1e-3, 0.5]),
            amsbound=FLAG,
        ),
        refused_here=(*_BAD_PAIR, *bad_values(final_lr=[-1.0, NAN], gamma=[0.0, 1.0])),
    ),
}
"""One case per algorithm, by the name of its constructor."""
