"""Rows of adaptive algorithms: other implementations, options that match, and causes."""

from typing import Any

from tests.agreement.row import Cause, Row, alike, in_optax

KAHAN = {"kahan_sum": False, "foreach": False, "triton": False}
HEAVYBALL = {"multi_tensor": False, "compile_step": False, "promote": False}
PAIR, TRIPLE = (0.9, 0.99), (0.9, 0.99, 0.999)
DECAY: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
DECOUPLED = {**DECAY, "weight_decouple": True}
COUPLED = {**DECAY, "weight_decouple": False}
BELIEF = {**DECAY, "betas": PAIR, "eps": 1e-8}

ADEMAMIX = [
    Row(
        "ademamix",
        "pytorch_optimizer",
        "AdEMAMix",
        {**DECAY, "betas": TRIPLE, "alpha": 2.0, "alpha_warmup": 20, "beta3_warmup": 20},
        {**DECOUPLED, "betas": TRIPLE, "alpha": 2.0, "t_alpha_beta3": 20},
    ),
    in_optax("ademamix", "contrib.ademamix", {**DECAY, "betas": TRIPLE, "alpha": 2.0}),
    alike(
        "ademamix",
        "heavyball",
        "AdEMAMix",
        {**DECAY, "betas": TRIPLE, "alpha": 2.0},
        HEAVYBALL,
        coarsest="float32",
    ),
]
ADOPT = [
    alike(
        "adopt", "adopt", "ADOPT", {**DECAY, "betas": PAIR, "decouple": True}, {"foreach": False}
    ),
    in_optax("adopt", "contrib.adopt", {"lr": 0.01, "betas": PAIR}),
    alike(
        "adopt",
        "pytorch_optimizer",
        "ADOPT",
        {"lr": 0.01, "betas": PAIR},
        {"foreach": False},
        cause=Cause(
            "pytorch-optimizer clips step t to (t + 1)^(1/4), and the paper to t^(1/4).",
            ours={"clip": False},
            theirs={"clip_lambda": None},
        ),
    ),
    alike(
        "adopt",
        "heavyball",
        "ADOPT",
        {"lr": 0.01, "betas": PAIR},
        {"eps": 1e-06, **HEAVYBALL},
        cause=Cause(
            "heavyball corrects the bias of both averages, so that it forgets the first square, "
            "and does not clip.",
            ours={"clip": False},
            variant="adopt_without_bias_correction",
        ),
        coarsest="float32",
    ),
]
ADAN = [
    alike("adan", "optimi", "Adan", {**DECAY, "eps": 1e-6}, KAHAN),
    Row(
        "adan",
        "pytorch_optimizer",
        "Adan",
        {**DECAY, "no_prox": True},
        DECOUPLED,
    ),
    alike(
        "adan",
        "adan_pytorch",
        "Adan",
        DECAY,
        cause=Cause(
            "adan-pytorch leaves its averages at 0 in the first step, which it counts.",
            variant="adan_with_a_first_step",
        ),
    ),
    in_optax(
        "adan",
        "adan",
        {"lr": 0.01},
        {"eps_root": 0.0},
        cause=Cause(
            "optax weighs differences by 1 - b2 where its b2 is 1 less the paper's: by 0.08 and "
            "not 0.92. With b2 = 1/2 both are the same.",
            ours={"betas": (0.98, 0.5, 0.99)},
            theirs={"b2": 0.5},
        ),
    ),
]
ADABELIEF = [
    alike(
        "adabelief",
        "adabelief_pytorch",
        "AdaBelief",
        BELIEF,
        {"rectify": False, "print_change_log": False},
    ),
    alike("adabelief", "pytorch_optimizer", "AdaBelief", BELIEF, {"foreach": False}),
    in_optax(
        "adabelief", "adabelief", {"lr": 0.01, "betas": PAIR, "eps": 1e-8}, {"eps_root": 1e-8}
    ),
]
YOGI = [
    Row(
        "yogi",
        "pytorch_optimizer",
        "Yogi",
        {**DECAY, "betas": PAIR},
        {**COUPLED, "betas": PAIR},
        cause=Cause(
            "pytorch-optimizer starts the average gradient at the same 1e-6 as the average square.",
            ours={"initial_accumulator_value": 0.0},
            theirs={"initial_accumulator": 0.0},
        ),
    ),
    in_optax(
        "yogi",
        "yogi",
        {"lr": 0.01, "betas": PAIR},
        cause=Cause(
            "optax starts the average gradient at the same 1e-6 as the average square.",
            ours={"initial_accumulator_value": 0.0},
            variant="yogi_from_zero",
        ),
    ),
]
LAPROP = [
    alike(
        "laprop",
        "pytorch_optimizer",
        "LaProp",
        {"lr": 0.01, "betas": PAIR},
        {"foreach": False},
        cause=Cause(
            "pytorch-optimizer adds 1e-15 to the average square, under the root.",
            variant="laprop_with_a_plain_root",
        ),
    ),
    alike(
        "laprop",
        "heavyball",
        "LaProp",
        {"lr": 0.01, "betas": PAIR, "eps": 1e-8},
        HEAVYBALL,
        coarsest="float32",
    ),
]
STABLE_ADAMW = [
    alike("stable_adamw", "optimi", "StableAdamW", DECAY, KAHAN),
    Row(
        "stable_adamw",
        "pytorch_optimizer",
        "StableAdamW",
        {**DECAY, "eps": 1e-8},
        {**DECAY, "foreach": False, "kahan_sum": False},
    ),
]
QHADAM = [
    alike("qhadam", "qhoptim.pyt", "QHAdam", {**DECAY, "betas": PAIR, "nus": (0.7, 0.9)}),
    Row(
        "qhadam",
        "pytorch_optimizer",
        "QHAdam",
        {**DECAY, "betas": PAIR, "nus": (0.7, 0.9)},
        {**COUPLED, "betas": PAIR, "nus": (0.7, 0.9), "foreach": False},
        coarsest="float32",
    ),
]
ADABOUND = [
    alike("adabound", "adabound", "AdaBound", {**DECAY, "betas": PAIR, "gamma": 0.01}),
    Row(
        "adabound",
        "pytorch_optimizer",
        "AdaBound",
        {**DECAY, "betas": PAIR, "gamma": 0.01},
        {**COUPLED, "betas": PAIR, "gamma": 0.01, "foreach": False},
        cause=Cause(
            "pytorch-optimizer adds 1e-15 to the average square, under the root.",
            variant="adabound_with_a_plain_root",
        ),
    ),
]
ROWS = [
    *ADEMAMIX,
    *ADOPT,
    *ADAN,
    *ADABELIEF,
    *YOGI,
    *LAPROP,
    *STABLE_ADAMW,
    *QHADAM,
    *ADABOUND,
]
"""Rows with their options and causes."""
