"""Cases of algorithms whose steps are orthogonal matrices."""

from hypothesis import strategies as st

from functional_optim import algorithms
from functional_optim.algorithms.polar import PolarFactor

from .case import (
    BAD_LR,
    DECAY,
    FLAG,
    LR,
    NAN,
    NAN_LR,
    Case,
    bad_values,
    some,
)

_BAD_LR = (*BAD_LR, *NAN_LR)
_BAD_MOMENTUM = bad_values(momentum=[1.0, NAN])
_BAD_POLAR = bad_values(polar=["1.0 2.0", [(NAN, 0.0, 0.0)]], iteration_dtype=["int8"])
_MOMENTUM = st.sampled_from([0.0, 0.5, 0.95])
_DTYPE = st.sampled_from(["bfloat16", "float32", "parameter"])
_POLAR = st.sampled_from(
    [
        None,
        PolarFactor.quintic(2, (2.0, -1.5, 0.5)),
        PolarFactor.polar_express(3),
        PolarFactor.quintic(2, (1.5, -0.5, 0.0)),
        PolarFactor(()),
    ]
)

MUON_CASES: dict[str, Case] = {
    "normuon": Case(
        algorithms.normuon,
        options=some(
            lr=LR,
            weight_decay=DECAY,
            momentum=_MOMENTUM,
            beta2=st.sampled_from([0.0, 0.9]),
            nesterov=FLAG,
            adjust_lr_fn=st.sampled_from([None, "original", "match_rms_adamw"]),
            polar=_POLAR,
            iteration_dtype=_DTYPE,
            maximize=FLAG,
        ),
        refused_here=(
            *_BAD_LR,
            *_BAD_MOMENTUM,
            *_BAD_POLAR,
            *bad_values(beta2=[1.0], eps=[-1.0], weight_decay=[-0.1], adjust_lr_fn=["spectral"]),
        ),
        matrices=True,
    ),
    "scion": Case(
        algorithms.scion,
        options=some(
            lr=LR,
            momentum=_MOMENTUM,
            norm=st.sampled_from(["spectral", "sign", "row_norm", "col_norm"]),
            scale=st.sampled_from([0.5, 2.0]),
            unconstrained=FLAG,
            normalized=FLAG,
            polar=_POLAR,
            iteration_dtype=_DTYPE,
            maximize=FLAG,
        ),
        refused_here=(
            *_BAD_LR,
            *_BAD_MOMENTUM,
            *_BAD_POLAR,
            *bad_values(norm=["other"], scale=[-1.0]),
        ),
        matrices=True,
    ),
    "dion": Case(
        algorithms.dion,
        options=some(
            lr=LR,
            weight_decay=DECAY,
            momentum=st.sampled_from([0.0, 0.5, 0.95]),
            rank=st.sampled_from([1, 2, 100]),
            eps=st.sampled_from([1e-8, 0.1]),
            maximize=FLAG,
        ),
        refused_here=(
            *_BAD_LR,
            *bad_values(momentum=[1.5, NAN], rank=[0], eps=[-1.0], weight_decay=[-0.1]),
        ),
        matrices=True,
    ),
}
"""One case per algorithm, by the name of its constructor."""

MUON_CHAINS: dict[str, Case] = {
    "muon with options": Case(
        algorithms.muon,
        options=st.fixed_dictionaries(
            {"normalization": st.sampled_from(["add", "before_cast"])},
            optional={
                "lr": LR,
                "weight_decay": DECAY,
                "momentum": _MOMENTUM,
                "nesterov": FLAG,
                "adjust_lr_fn": st.sampled_from(
                    ["original", "keller", "match_rms_adamw", "spectral", "max_side", "unscaled"]
                ),
                "polar": _POLAR,
                "iteration_dtype": _DTYPE,
                "fused_products": FLAG,
            },
        ),
        matrices=True,
    )
}
"""Muon with options that select the other rule."""
