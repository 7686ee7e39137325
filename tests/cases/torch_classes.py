"""Cases of NAdam, RAdam, ASGD, Adafactor and SparseAdam of torch.optim."""

from functools import partial, update_wrapper

import torch
from hypothesis import strategies as st

from functional_optim import algorithms
from functional_optim.algorithms.sparse_adam import sparse_adam

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
    bad_values,
    some,
)

_ADAM_OPTIONS = {
    "lr": LR,
    "betas": BETAS,
    "eps": EPS,
    "weight_decay": DECAY,
    "decoupled_weight_decay": FLAG,
    "maximize": FLAG,
}

TORCH_CASES: dict[str, Case] = {
    "nadam": Case(
        algorithms.nadam,
        torch.optim.NAdam,
        some(**_ADAM_OPTIONS, momentum_decay=st.sampled_from([0.0, 4e-3, 0.5])),
        refused=(*BAD_ADAM, *bad_values(momentum_decay=[-1.0])),
        refused_here=(*NAN_ADAM, *bad_values(momentum_decay=[NAN])),
    ),
    "radam": Case(
        algorithms.radam,
        torch.optim.RAdam,
        some(**_ADAM_OPTIONS),
        refused=BAD_ADAM,
        refused_here=NAN_ADAM,
        max_steps=7,  # the first five are plain
    ),
    "asgd": Case(
        algorithms.asgd,
        torch.optim.ASGD,
        some(
            lr=LR,
            lambd=st.sampled_from([0.0, 1e-4, 0.3]),
            alpha=st.sampled_from([0.0, 0.75]),
            t0=st.sampled_from([-3.0, 0.0, 2.0, 1e6]),
            weight_decay=DECAY,
            maximize=FLAG,
        ),
        refused=(*BAD_LR, *bad_values(weight_decay=[-1.0])),
        refused_here=(*NAN_LR, *bad_values(lambd=[NAN], alpha=[NAN], t0=[NAN])),
    ),
    "adafactor": Case(
        algorithms.adafactor,
        torch.optim.Adafactor,
        some(
            lr=LR,
            beta2_decay=st.sampled_from([-0.8, 0.0]),
            eps=st.sampled_from([(None, 1e-3), (1e-3, 0.5), (0.1, 0.0)]),
            d=st.sampled_from([1.0, 1.5]),
            weight_decay=DECAY,
            maximize=FLAG,
        ),
        refused=(
            *BAD_LR,
            *bad_values(
                beta2_decay=[0.1], eps=[(-1.0, 1e-3), (None, -1.0)], d=[0.5], weight_decay=[-1.0]
            ),
        ),
        refused_here=(*NAN_LR, *bad_values(beta2_decay=[NAN], eps=[(NAN, 1e-3)], d=[NAN])),
        takes_complex=False,
    ),
    "sparse_adam": Case(
        # The laws draw dense gradients.
        update_wrapper(partial(sparse_adam, takes_dense=True), sparse_adam),
        torch.optim.SparseAdam,
        some(lr=st.sampled_from([1e-3, 0.1, 1.0]), betas=BETAS, eps=EPS, maximize=FLAG),
        refused=(*BAD_LR, *bad_values(lr=[0.0], betas=[(1.0, 0.9), (0.9, -0.1)], eps=[0.0])),
        refused_here=(*NAN_LR, *bad_values(betas=[(NAN, 0.9)], eps=[NAN])),
        takes_complex=False,
    ),
}
"""One case per algorithm, by the name of its constructor."""
