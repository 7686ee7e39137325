"""Rows of rules that precondition matrices on both sides: other implementations, and causes."""

import math
from typing import Any

from tests.agreement.row import Cause, Row

HEAVYBALL: dict[str, Any] = {
    "multi_tensor": False,
    "compile_step": False,
    "promote": False,
    "merge_dims": False,
    "use_precond_schedule": False,
}
SCALABLE: dict[str, Any] = {
    "lr": 0.1,
    "betas": (0.0, 0.9),
    "start_preconditioning_step": 2,
    "preconditioning_compute_steps": 2,
    "shape_interpretation": False,
    "nesterov": False,
    "use_svd": True,
    "graft_type": 1,
}
SHAMPOO: dict[str, Any] = {
    "lr": 0.1,
    "betas": (0.0, 0.9),
    "graft": "sgd",
    "precondition_frequency": 2,
}
KL_SOAP: dict[str, Any] = {"lr": 0.1, "betas": (0.95, 0.95), "weight_decay": 0.0}
NEVER = 10**6

ROWS = [
    Row(
        "shampoo",
        "pytorch_optimizer",
        "Shampoo",
        {"lr": 0.1, "betas": (0.0, 1.0), "eps": 1e-4},
        {"lr": 0.1, "matrix_eps": 1e-4},
        shapes="matrices",
    ),
    Row(
        "shampoo",
        "pytorch_optimizer",
        "ScalableShampoo",
        {**SHAMPOO, "eps": 1e-6},
        {**SCALABLE, "matrix_eps": 1e-6},
        shapes="square",
        cause=Cause(
            "pytorch-optimizer adds eps to the factors once, before the first step, and their "
            "average forgets it.",
            ours={"eps": 0.0},
            theirs={"matrix_eps": 0.0},
        ),
    ),
    Row(
        "shampoo",
        "pytorch_optimizer",
        "ScalableShampoo",
        {**SHAMPOO, "eps": 0.0, "block_size": 4},
        {**SCALABLE, "matrix_eps": 0.0, "block_size": 4},
        shapes="square",
        cause=Cause(
            "pytorch-optimizer grafts the norm of a whole matrix, and Shi et al. that of each "
            "block; with one block, it is the same.",
            ours={"block_size": 8},
            theirs={"block_size": 8},
        ),
    ),
    Row(
        "kl_soap",
        "heavyball",
        "KLSOAP",
        {**KL_SOAP, "correct_bias": True, "precondition_frequency": 2},
        {**KL_SOAP, "precondition_frequency": 2, **HEAVYBALL},
        shapes="matrices",
        coarsest="float32",
        cause=Cause(
            "heavyball takes eigenvalues from the factors and corrects the bias of these, where "
            "the authors average eigenvalues that begin at 0.1.",
            ours={"precondition_frequency": NEVER},
            theirs={"precondition_frequency": NEVER},
            shapes="square",
        ),
    ),
    Row(
        "kron",
        "kron_torch",
        "Kron",
        {"lr": 0.1, "update_decay": 0.0},
        {"lr": 0.1, "preconditioner_update_probability": 1.0},
        shapes="matrices",
        cause=Cause(
            "kron-torch draws from torch's generator, adds its noise to the step too, and solves "
            "in float32.",
            variant="kron_torch_with_our_draws",
        ),
    ),
    Row(
        "kron",
        "pytorch_optimizer",
        "Kron",
        {"lr": 0.1, "update_decay": 0.0},
        {"lr": 0.1, "pre_conditioner_update_probability": 1.0, "balance_prob": 0.0},
        shapes="matrices",
        cause=Cause(
            "pytorch-optimizer draws from torch's generator, adds no noise to gradients, and "
            "solves in float32.",
            variant="pytorch_optimizer_kron_with_our_draws",
        ),
    ),
    Row(
        "kron",
        "heavyball",
        "PSGDKron",
        {"lr": 0.1, "update_decay": 0.0, "max_update_rms": math.inf},
        {
            "lr": 0.1,
            "precond_init_scale": 1.0,
            "preconditioner_update_probability": 1.0,
            "update_clipping": None,
            "multi_tensor": False,
            "compile_step": False,
            "promote": False,
        },
        shapes="matrices",
        coarsest="float32",
        cause=Cause(
            "heavyball draws other numbers, balances the factors in each update, and divides by a "
            "running bound of the norm that it finds by power iterations; without fitting, it is "
            "the same.",
            ours={"precond_lr": 0.0},
            theirs={"precond_lr": 0.0},
        ),
    ),
    Row(
        "galore_adamw",
        "pytorch_optimizer",
        "GaLore",
        {"lr": 0.1, "eps": 0.0, "rank": 3, "update_proj_gap": 7},
        {
            "lr": 0.1,
            "eps": 0.0,
            "group": {"rank": 3, "update_proj_gap": 7, "scale": 0.25, "projection_type": "std"},
        },
        shapes="matrices",
        cause=Cause(
            "pytorch-optimizer computes P one step earlier, takes the signs of singular vectors "
            "as LAPACK chooses them, and computes these in float32.",
            variant="galore_with_our_signs",
        ),
    ),
]
"""Rows with their options and causes."""
