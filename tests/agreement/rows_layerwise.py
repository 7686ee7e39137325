"""Rows of algorithms with one step size per tensor or block, or based on signs or distances."""

from typing import Any

from tests.agreement.row import Row

DECAY = {"lr": 0.01, "weight_decay": 0.1}
DISTANCE: dict[str, Any] = {"weight_decay": 0.1, "d0": 1e-3}
ADAPTED = {**DISTANCE, "decouple": True, "use_bias_correction": True}
MOMENTUM = {"momentum": 0.9, "d0": 0.1}

ROWS = [
    Row("sign_sgd", "optax", "sign_sgd", {"lr": 0.01}, {"learning_rate": 0.01}),
    Row("signum", "optax", "signum", {"lr": 0.01}, {"learning_rate": 0.01}),
    Row(
        "signum",
        "pytorch_optimizer",
        "SignSGD",
        {**DECAY, "momentum": 0.9},
        {**DECAY, "momentum": 0.9},
    ),
    Row(
        "novograd",
        "optax",
        "novograd",
        {"lr": 0.01, "weight_decay": 0.01},
        {"learning_rate": 0.01, "b1": 0.95, "b2": 0.98, "eps": 1e-8, "weight_decay": 0.01},
    ),
    Row(
        "novograd",
        "pytorch_optimizer",
        "NovoGrad",
        {"lr": 0.01, "weight_decay": 0.01},
        {"lr": 0.01, "weight_decay": 0.01},
    ),
    Row("came", "came_pytorch", "CAME", DECAY, DECAY),
    Row("came", "pytorch_optimizer", "CAME", DECAY, DECAY),
    Row("dog", "dog", "DoG", {"reps_rel": 0.1}, {"reps_rel": 0.1}),
    Row("dog", "optax", "contrib.dog", {"reps_rel": 0.1}, {"init_step": ("heuristic", 0.1)}),
    Row("ldog", "dog", "LDoG", {"reps_rel": 0.1}, {"reps_rel": 0.1}),
    Row("dadapt_sgd", "dadaptation", "DAdaptSGD", MOMENTUM, MOMENTUM),
    Row("dadapt_sgd", "pytorch_optimizer", "DAdaptSGD", MOMENTUM, MOMENTUM, coarsest="float32"),
    Row("dadapt_adam", "dadaptation", "DAdaptAdam", ADAPTED, ADAPTED),
    Row(
        "dadapt_adam",
        "pytorch_optimizer",
        "DAdaptAdam",
        ADAPTED,
        {**DISTANCE, "weight_decouple": True, "bias_correction": True},
    ),
    Row(
        "dadapt_adam",
        "optax",
        "contrib.dadapt_adamw",
        ADAPTED,
        {"estim_lr0": 1e-3, "weight_decay": 0.1},
    ),
]
"""Rows with their options and causes."""
