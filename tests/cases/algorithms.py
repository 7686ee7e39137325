"""Table of cases: all algorithms of this package, with their options and oracles.

A new algorithm needs one entry, and all laws run over it. A test fails if an entry is missing.
"""

import torch
from hypothesis import strategies as st

from functional_optim import algorithms

from .adaptive import ADAPTIVE_CASES
from .case import (
    BAD_ADAM,
    BAD_LR,
    BETAS,
    DECAY,
    EPS,
    FLAG,
    LR,
    NAN,
    NAN_ADAM,
    NAN_LR,
    Case,
    Options,
    bad_values,
    some,
)
from .layerwise import LAYERWISE_CASES
from .muon import MUON_CASES
from .shampoo import SHAMPOO_CASES
from .torch_classes import TORCH_CASES


def _sgd_options() -> Options:
    plain = some(lr=LR, weight_decay=DECAY, maximize=FLAG)
    damped = {"momentum": st.sampled_from([0.5, 0.9]), "dampening": st.sampled_from([0.0, 0.3])}
    nesterov = {"momentum": st.sampled_from([0.5, 0.9]), "nesterov": st.just(value=True)}
    extra: Options = st.one_of(
        st.just({}), st.fixed_dictionaries(damped), st.fixed_dictionaries(nesterov)
    )
    return st.builds(lambda a, b: {**a, **b}, plain, extra)


_ADAM_OPTIONS = {
    "lr": LR,
    "betas": BETAS,
    "eps": EPS,
    "weight_decay": DECAY,
    "amsgrad": FLAG,
    "maximize": FLAG,
}

_SCHEDULE_FREE = {
    "warmup_steps": st.sampled_from([0, 1, 3]),
    "r": st.sampled_from([-0.5, 0.0, 1.0]),
    "weight_lr_power": st.sampled_from([0.0, 1.0, 2.0]),
    "maximize": FLAG,
}
_BAD_SCHEDULE_FREE = bad_values(warmup_steps=[-1], r=[NAN], weight_lr_power=[-1.0])

CASES: dict[str, Case] = {
    "sgd": Case(
        algorithms.sgd,
        torch.optim.SGD,
        _sgd_options(),
        refused=(
            *BAD_LR,
            *bad_values(momentum=[-0.1], weight_decay=[-0.1], nesterov=[True]),
            {"nesterov": True, "momentum": 0.9, "dampening": 0.1},
        ),
        refused_here=(*NAN_LR, *bad_values(momentum=[NAN], dampening=[NAN], weight_decay=[NAN])),
    ),
    "adam": Case(
        algorithms.adam,
        torch.optim.Adam,
        some(**_ADAM_OPTIONS, decoupled_weight_decay=FLAG),
        refused=BAD_ADAM,
        refused_here=NAN_ADAM,
    ),
    "adamw": Case(
        algorithms.adamw,
        torch.optim.AdamW,
        some(**_ADAM_OPTIONS),
        refused=BAD_ADAM,
        refused_here=NAN_ADAM,
    ),
    "adagrad": Case(
        algorithms.adagrad,
        torch.optim.Adagrad,
        some(
            lr=LR,
            lr_decay=st.sampled_from([0.0, 0.1]),
            weight_decay=DECAY,
            initial_accumulator_value=st.sampled_from([0.0, 0.3]),
            eps=st.sampled_from([1e-10, 1e-3]),
            maximize=FLAG,
        ),
        refused=(
            *BAD_LR,
            *bad_values(
                lr_decay=[-1.0], weight_decay=[-1.0], initial_accumulator_value=[-1.0], eps=[-1.0]
            ),
        ),
        refused_here=(*NAN_LR, *bad_values(lr_decay=[NAN], initial_accumulator_value=[NAN])),
    ),
    "adadelta": Case(
        algorithms.adadelta,
        torch.optim.Adadelta,
        some(
            lr=LR,
            rho=st.sampled_from([0.0, 0.9, 1.0]),
            eps=st.sampled_from([1e-6, 1e-3]),
            weight_decay=DECAY,
            maximize=FLAG,
        ),
        refused=(*BAD_LR, *bad_values(rho=[1.5, -0.1], eps=[-1.0], weight_decay=[-1.0])),
        refused_here=(*NAN_LR, *bad_values(rho=[NAN], eps=[NAN])),
    ),
    "adamax": Case(
        algorithms.adamax,
        torch.optim.Adamax,
        some(lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, maximize=FLAG),
        refused=BAD_ADAM,
        refused_here=NAN_ADAM,
    ),
    "rmsprop": Case(
        algorithms.rmsprop,
        torch.optim.RMSprop,
        some(
            lr=LR,
            alpha=st.sampled_from([0.0, 0.9, 0.99]),
            eps=EPS,
            weight_decay=DECAY,
            momentum=st.sampled_from([0.0, 0.9]),
            centered=FLAG,
            maximize=FLAG,
        ),
        refused=(
            *BAD_LR,
            *bad_values(eps=[-1.0], momentum=[-1.0], weight_decay=[-1.0], alpha=[-1.0]),
        ),
        refused_here=(*NAN_LR, *bad_values(alpha=[NAN], momentum=[NAN])),
    ),
    "rprop": Case(
        algorithms.rprop,
        torch.optim.Rprop,
        some(
            lr=LR,
            etas=st.sampled_from([(0.5, 1.2), (0.1, 3.0)]),
            step_sizes=st.sampled_from([(1e-6, 50.0), (0.01, 0.1)]),
            maximize=FLAG,
        ),
        refused=(*BAD_LR, *bad_values(etas=[(0.0, 1.2), (0.5, 1.0), (1.1, 1.2)])),
        refused_here=(*NAN_LR, *bad_values(step_sizes=[(NAN, 50.0)])),
    ),
    "muon": Case(
        algorithms.muon,
        torch.optim.Muon,
        some(
            lr=LR,
            weight_decay=DECAY,
            momentum=st.sampled_from([0.0, 0.5, 0.95]),
            nesterov=FLAG,
            ns_coefficients=st.sampled_from([(3.4445, -4.775, 2.0315), (2.0, -1.5, 0.5)]),
            eps=st.sampled_from([1e-7, 0.5]),
            ns_steps=st.sampled_from([0, 1, 5]),
            adjust_lr_fn=st.sampled_from([None, "original", "match_rms_adamw"]),
        ),
        refused=(
            *BAD_LR,
            *bad_values(momentum=[-0.1], weight_decay=[-0.1], adjust_lr_fn=["other"]),
        ),
        refused_here=(
            *NAN_LR,
            *bad_values(
                momentum=[NAN], ns_coefficients=[(NAN, 0.0, 0.0)], eps=[NAN], ns_steps=[100, -1]
            ),
        ),
        matrices=True,
    ),
    "soap": Case(
        algorithms.soap,
        options=some(
            lr=LR,
            betas=BETAS,
            shampoo_beta=st.sampled_from([0.0, 0.9]),
            weight_decay=DECAY,
            precondition_frequency=st.sampled_from([1, 2]),
            max_precond_dim=st.sampled_from([0, 2, 100]),
        ),
        refused_here=(
            *BAD_LR,
            *NAN_LR,
            *bad_values(
                betas=[(1.0, 0.5)],
                shampoo_beta=[1.0, NAN],
                eps=[-1.0],
                weight_decay=[-1.0],
                precondition_frequency=[0],
                max_precond_dim=[-1],
            ),
        ),
        matrices=True,
    ),
    "qhm": Case(
        algorithms.qhm,
        options=some(
            lr=LR,
            momentum=st.sampled_from([0.0, 0.9]),
            nu=st.sampled_from([0.0, 0.7, 1.0]),
            weight_decay=DECAY,
            weight_decay_type=st.sampled_from(["grad", "direct"]),
            maximize=FLAG,
        ),
        refused_here=(
            *BAD_LR,
            *NAN_LR,
            *bad_values(
                momentum=[1.0, NAN], nu=[NAN], weight_decay=[-1.0], weight_decay_type=["other"]
            ),
        ),
    ),
    "lamb": Case(
        algorithms.lamb,
        options=some(
            lr=LR,
            betas=BETAS,
            eps=EPS,
            weight_decay=DECAY,
            min_norm=st.sampled_from([0.0, 0.5]),
            max_ratio=st.sampled_from([0.3, 10.0]),
            maximize=FLAG,
        ),
        refused_here=(
            *BAD_ADAM,
            *NAN_ADAM,
            *bad_values(min_norm=[-1.0, NAN], max_ratio=[-1.0, NAN]),
        ),
    ),
    "lars": Case(
        algorithms.lars,
        options=some(
            lr=LR,
            momentum=st.sampled_from([0.5, 0.9]),
            weight_decay=DECAY,
            nesterov=FLAG,
            trust_coefficient=st.sampled_from([1e-3, 0.5]),
            maximize=FLAG,
        ),
        refused_here=(
            *BAD_LR,
            *NAN_LR,
            *bad_values(momentum=[-0.1, NAN], weight_decay=[-0.1], trust_coefficient=[-1.0, NAN]),
        ),
    ),
    "lion": Case(
        algorithms.lion,
        options=some(lr=LR, betas=BETAS, weight_decay=DECAY, maximize=FLAG),
        refused_here=(*BAD_LR, *NAN_LR, *bad_values(betas=[(1.0, 0.5), (0.5, NAN)])),
    ),
    "rowwise_adagrad": Case(
        algorithms.rowwise_adagrad,
        options=some(lr=LR, eps=EPS, weight_decay=DECAY, maximize=FLAG),
        refused_here=(*BAD_LR, *NAN_LR, *bad_values(eps=[-1.0, NAN], weight_decay=[-1.0])),
    ),
    "ftrl": Case(
        algorithms.ftrl,
        options=some(
            lr=LR,
            beta=st.sampled_from([0.0, 0.5]),
            l1=st.sampled_from([0.0, 0.3, 10.0]),
            l2=DECAY,
            maximize=FLAG,
        ),
        refused_here=(*BAD_LR, *NAN_LR, *bad_values(beta=[-1.0], l1=[NAN, -1.0], l2=[-1.0])),
    ),
    "prodigy": Case(
        algorithms.prodigy,
        options=some(
            lr=st.sampled_from([0.0, 0.5, 1.0]),
            betas=BETAS,
            beta3=st.sampled_from([0.0, 0.9, 1.0]),
            eps=EPS,
            weight_decay=DECAY,
            decouple=FLAG,
            use_bias_correction=FLAG,
            safeguard_warmup=FLAG,
            d0=st.sampled_from([1e-6, 0.1]),
            d_coef=st.sampled_from([0.5, 2.0]),
            growth_rate=st.sampled_from([1.0, 1.5]),
            slice_p=st.sampled_from([1, 2, 11]),
            maximize=FLAG,
        ),
        refused_here=(
            *BAD_ADAM,
            *NAN_ADAM,
            *bad_values(
                beta3=[1.5], eps=[0.0], d0=[0.0], d_coef=[NAN], growth_rate=[0.5], slice_p=[0]
            ),
        ),
        one_chain=False,
    ),
    "schedule_free_sgd": Case(
        algorithms.schedule_free_sgd,
        options=some(
            lr=LR, momentum=st.sampled_from([0.1, 0.9]), weight_decay=DECAY, **_SCHEDULE_FREE
        ),
        refused_here=(
            *BAD_LR,
            *NAN_LR,
            *_BAD_SCHEDULE_FREE,
            *bad_values(momentum=[0.0, 1.0, NAN], weight_decay=[-1.0]),
        ),
        one_chain=False,
    ),
    "schedule_free_adamw": Case(
        algorithms.schedule_free_adamw,
        options=some(
            lr=LR,
            betas=st.sampled_from([(0.9, 0.999), (0.1, 0.0)]),
            eps=EPS,
            weight_decay=DECAY,
            **_SCHEDULE_FREE,
        ),
        refused_here=(*BAD_ADAM, *NAN_ADAM, *_BAD_SCHEDULE_FREE, *bad_values(betas=[(0.0, 0.9)])),
        one_chain=False,
    ),
    **LAYERWISE_CASES,
    **MUON_CASES,
    **ADAPTIVE_CASES,
    **TORCH_CASES,
    **SHAMPOO_CASES,
}
"""One case per algorithm, by the name of its constructor."""


ANY_SHAPE: dict[str, Case] = {name: one for name, one in CASES.items() if not one.matrices}
"""Cases whose parameters may have any shape."""
