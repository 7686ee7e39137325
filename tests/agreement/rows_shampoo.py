"""Rows of algorithms with a factor for each side of a matrix."""

from tests.agreement.row import Cause, Row

HEAVYBALL = {"multi_tensor": False, "compile_step": False, "promote": False}
STILL = {"precondition_frequency": 100, "weight_decay": 0.0}
KRON = {"lr": 0.01, "merge_dims": False, "preconditioner_update_probability": 1.0}

ROWS = [
    Row(
        "shampoo",
        "pytorch_optimizer",
        "Shampoo",
        {"lr": 0.01, "betas": (0.0, 1.0), "eps": 1e-6},
        {"lr": 0.01, "momentum": 0.0},
        shapes="matrices",
    ),
    Row(
        "kl_soap",
        "heavyball",
        "KLSOAP",
        {"lr": 0.01, "precondition_frequency": 2, "correct_bias": True},
        {
            "lr": 0.01,
            "betas": (0.9, 0.98),
            "shampoo_beta": 0.98,
            "merge_dims": False,
            "precondition_frequency": 2,
            "use_precond_schedule": False,
            **HEAVYBALL,
        },
        shapes="matrices",
        coarsest="float32",
        cause=Cause(
            "heavyball refreshes the basis at other steps, and chooses other eigenvectors where "
            "a side that is longer than the other has several eigenvalues 0.",
            ours=STILL,
            theirs=STILL,
            shapes="square",
        ),
    ),
    Row(
        "kron",
        "kron_torch",
        "Kron",
        {"lr": 0.01},
        KRON,
        shapes="matrices",
        coarsest="float32",
        cause=Cause(
            "Each draws random vectors of its own, and kron-torch adds a little of them to the "
            "gradient.",
            ours={"precond_lr": 0.0},
            theirs={"precond_lr": 0.0},
            variant="kron_without_random_vectors",
        ),
    ),
    Row(
        "kron",
        "pytorch_optimizer",
        "Kron",
        {"lr": 0.01, "update_probability": 0.0, "min_update_probability": 0.0},
        {"lr": 0.01, "pre_conditioner_update_probability": 0.0},
        shapes="matrices",
        coarsest="float32",
    ),
]
"""Rows with their options and causes."""
