"""Rows of Muon's family, apart from those of torch.optim and pytorch-optimizer."""

from tests.agreement.row import Cause, Row, alike

HEAVYBALL = {"multi_tensor": False, "compile_step": False, "promote": False}
POLYNOMIALS = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""Coefficients of heavyball's Newton-Schulz iteration."""

ROWS = [
    Row(
        "muon",
        "optax",
        "contrib.muon",
        {"lr": 0.1, "eps": 1e-8},
        {"learning_rate": 0.1, "weight_decay": 0.1},
        shapes="matrices",
        cause=Cause(
            "optax iterates in the dtype of the parameters, takes rows for the inputs of a "
            "layer in the factor by shape, corrects the bias of Nesterov momentum, and adds eps "
            "elsewhere.",
            ours={"iteration_dtype": "parameter", "nesterov": False, "eps": 0.0},
            theirs={"nesterov": False, "eps": 0.0},
            shapes="square",
        ),
    ),
    alike(
        "muon",
        "heavyball",
        "Muon",
        {"lr": 0.1},
        {"betas": (0.95, 0.99), "weight_decay": 0.1, **HEAVYBALL},
        shapes="matrices",
        coarsest="bfloat16",
        cause=Cause(
            "heavyball applies five polynomials in place of one, in float64 for float64, and "
            "adds the gradient to the momentum where Nesterov momentum averages them.",
            ours={"polar": POLYNOMIALS, "iteration_dtype": "float32", "nesterov": False},
            theirs={"nesterov": False},
        ),
    ),
    alike(
        "normuon",
        "pytorch_optimizer",
        "NorMuon",
        {"lr": 0.1},
        {"group": {"use_muon": True}},
        shapes="matrices",
        coarsest="bfloat16",
    ),
    alike(
        "scion",
        "pytorch_optimizer",
        "SCION",
        {"lr": 0.01},
        {"momentum": 0.1, "constraint": True},
        shapes="matrices",
        coarsest="bfloat16",
    ),
]
"""Rows with their options and causes."""
