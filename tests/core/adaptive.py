"""Adaptive algorithms for the tables of the core's tests."""

from functional_optim import (
    Optimizer,
    adabelief,
    adabound,
    adan,
    ademamix,
    adopt,
    laprop,
    qhadam,
    stable_adamw,
    yogi,
)

VARIANTS: dict[str, Optimizer] = {
    "adabelief": adabelief(0.1, eps=1e-3, weight_decay=0.1),
    "adabelief amsgrad": adabelief(
        0.1, eps=1e-3, weight_decay=0.1, amsgrad=True, decoupled_weight_decay=False
    ),
    "adabound": adabound(0.1, gamma=0.2, weight_decay=0.1),
    "adabound amsbound": adabound(0.1, final_lr=0.2, gamma=0.5, amsbound=True),
    "adan": adan(0.1, weight_decay=0.2),
    "adan without prox": adan(0.1, weight_decay=0.2, no_prox=True, maximize=True),
    "ademamix": ademamix(0.1, (0.9, 0.999, 0.99), weight_decay=0.2),
    "ademamix warm-up": ademamix(0.1, alpha_warmup=3, beta3_warmup=2, maximize=True),
    "adopt": adopt(0.1, eps=0.5, weight_decay=0.1),
    "adopt decoupled": adopt(
        0.1, eps=0.5, weight_decay=0.2, decouple=True, clip=False, clip_power=0.0
    ),
    "laprop": laprop(0.1, weight_decay=0.2),
    "qhadam": qhadam(0.1, weight_decay=0.1),
    "qhadam decoupled": qhadam(
        0.1, nus=(0.5, 0.5), weight_decay=0.2, decoupled_weight_decay=True, maximize=True
    ),
    "stable_adamw": stable_adamw(0.1, weight_decay=0.2),
    "yogi": yogi(0.1, weight_decay=0.1),
    "yogi uncorrected": yogi(0.1, initial_accumulator_value=0.3, bias_correction=False),
}
"""Every algorithm, with the options that change its state or its path."""
