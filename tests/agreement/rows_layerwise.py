"""Rows of algorithms with one step size per tensor or block, or based on signs or distances."""

from typing import Any

from tests.agreement.row import Row, alike, in_optax

DECAY = {"lr": 0.01, "weight_decay": 0.1}
DISTANCE: dict[str, Any] = {"weight_decay": 0.1, "d0": 1e-3}
ADAPTED = {**DISTANCE, "decouple": True, "use_bias_correction": True}
MOMENTUM = {"momentum": 0.9, "d0": 0.1}

ROWS = [
    in_optax("sign_sgd", "sign_sgd", {"lr": 0.01}),
    in_optax("signum", "signum", {"lr": 0.01}),
    alike("signum", "pytorch_optimizer", "SignSGD", {**DECAY, "momentum": 0.9}),
    in_optax(
        "novograd",
        "novograd",
        {"lr": 0.01, "weight_decay": 0.01},
        {"b1": 0.95, "b2": 0.98, "eps": 1e-8},
    ),
    alike("novograd", "pytorch_optimizer", "NovoGrad", {"lr": 0.01, "weight_decay": 0.01}),
    alike("came", "came_pytorch", "CAME", DECAY),
    alike("came", "pytorch_optimizer", "CAME", DECAY),
    alike("dog", "dog", "DoG", {"reps_rel": 0.1}),
    Row("dog", "optax", "contrib.dog", {"reps_rel": 0.1}, {"init_step": ("heuristic", 0.1)}),
    alike("ldog", "dog", "LDoG", {"reps_rel": 0.1}),
    alike("dadapt_sgd", "dadaptation", "DAdaptSGD", MOMENTUM),
    alike("dadapt_sgd", "pytorch_optimizer", "DAdaptSGD", MOMENTUM, coarsest="float32"),
    alike("dadapt_adam", "dadaptation", "DAdaptAdam", ADAPTED),
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
