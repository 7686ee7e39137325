"""Rows of adaptive algorithms: other implementations, options that match, and causes."""

from typing import Any

from tests.agreement.row import Row

KAHAN = {"kahan_sum": False, "foreach": False, "triton": False}
HEAVYBALL = {"multi_tensor": False, "compile_step": False, "promote": False}
PAIR, TRIPLE = (0.9, 0.99), (0.9, 0.99, 0.999)
B1_B2: dict[str, Any] = {"b1": 0.9, "b2": 0.99}
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
    Row(
        "ademamix",
        "optax",
        "contrib.ademamix",
        {**DECAY, "betas": TRIPLE, "alpha": 2.0},
        {"learning_rate": 0.01, "weight_decay": 0.1, **B1_B2, "b3": 0.999, "alpha": 2.0},
    ),
    Row(
        "ademamix",
        "heavyball",
        "AdEMAMix",
        {**DECAY, "betas": TRIPLE, "alpha": 2.0},
        {**DECAY, "betas": TRIPLE, "alpha": 2.0, **HEAVYBALL},
        coarsest="float32",
    ),
]
ROWS = [
    *ADEMAMIX,
]
"""Rows with their options and causes."""
