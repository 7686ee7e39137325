"""Rows of algorithms that torch.optim has, too."""

from tests.agreement.row import Cause, Row

BETAS = (0.9, 0.99)
SINGLE = {"foreach": False}
KAHAN = {"kahan_sum": False, "foreach": False, "triton": False}
HEAVYBALL = {"multi_tensor": False, "compile_step": False, "promote": False}

ROWS = [
    Row(
        "sgd",
        "torch.optim",
        "SGD",
        {"lr": 0.1, "momentum": 0.9},
        {"lr": 0.1, "momentum": 0.9, **SINGLE},
    ),
    Row(
        "sgd", "optax", "sgd", {"lr": 0.1, "momentum": 0.9}, {"learning_rate": 0.1, "momentum": 0.9}
    ),
    Row(
        "sgd", "optimi", "SGD", {"lr": 0.1, "momentum": 0.9}, {"lr": 0.1, "momentum": 0.9, **KAHAN}
    ),
    Row(
        "sgd",
        "pytorch_optimizer",
        "SGDW",
        {"lr": 0.1, "momentum": 0.9},
        {"lr": 0.1, "momentum": 0.9},
    ),
    Row(
        "sgd",
        "heavyball",
        "SGD",
        {"lr": 0.1, "momentum": 0.9},
        {"lr": 0.1, "beta": 0.9, **HEAVYBALL},
        coarsest="float32",
    ),
    Row(
        "adam",
        "torch.optim",
        "Adam",
        {"lr": 0.1, "betas": BETAS},
        {"lr": 0.1, "betas": BETAS, **SINGLE},
    ),
    Row(
        "adam",
        "optax",
        "adam",
        {"lr": 0.1, "betas": BETAS},
        {"learning_rate": 0.1, "b1": 0.9, "b2": 0.99},
    ),
    Row(
        "adam",
        "optimi",
        "Adam",
        {"lr": 0.1, "betas": BETAS},
        {"lr": 0.1, "betas": BETAS, "eps": 1e-8, **KAHAN},
    ),
    Row(
        "adamw",
        "torch.optim",
        "AdamW",
        {"lr": 0.1, "betas": BETAS},
        {"lr": 0.1, "betas": BETAS, **SINGLE},
    ),
    Row(
        "adamw",
        "optax",
        "adamw",
        {"lr": 0.1, "betas": BETAS},
        {"learning_rate": 0.1, "b1": 0.9, "b2": 0.99, "weight_decay": 0.01},
    ),
    Row(
        "adamw",
        "optimi",
        "AdamW",
        {"lr": 0.1, "betas": BETAS},
        {"lr": 0.1, "betas": BETAS, "weight_decay": 0.01, "eps": 1e-8, **KAHAN},
    ),
    Row(
        "adamw",
        "heavyball",
        "AdamW",
        {"lr": 0.1, "betas": BETAS},
        {"lr": 0.1, "betas": BETAS, "weight_decay": 0.01, **HEAVYBALL},
        coarsest="float32",
    ),
    Row(
        "adagrad",
        "torch.optim",
        "Adagrad",
        {"lr": 0.1, "eps": 1e-7},
        {"lr": 0.1, "eps": 1e-7, **SINGLE},
    ),
    Row(
        "adagrad",
        "optax",
        "adagrad",
        {"lr": 0.1, "eps": 1e-7},
        {"learning_rate": 0.1, "initial_accumulator_value": 0.0, "eps": 1e-7},
        cause=Cause(
            "optax adds eps under the root, and torch behind it.",
            ours={"eps": 0.0, "eps_root": 1e-7},
        ),
    ),
    Row("adadelta", "torch.optim", "Adadelta", {"lr": 1.0}, {"lr": 1.0, **SINGLE}),
    Row("adadelta", "optax", "adadelta", {"lr": 1.0}, {"learning_rate": 1.0}),
    Row("adadelta", "pytorch_optimizer", "AdaDelta", {"lr": 1.0}, {"lr": 1.0}),
    Row("adamax", "torch.optim", "Adamax", {"lr": 0.1}, {"lr": 0.1, **SINGLE}),
    Row("adamax", "optax", "adamax", {"lr": 0.1}, {"learning_rate": 0.1}),
    Row("adamax", "pytorch_optimizer", "AdaMax", {"lr": 0.1}, {"lr": 0.1}),
    Row("rmsprop", "torch.optim", "RMSprop", {"lr": 0.01}, {"lr": 0.01, **SINGLE}),
    Row(
        "rmsprop",
        "optax",
        "rmsprop",
        {"lr": 0.01},
        {"learning_rate": 0.01, "decay": 0.99},
        cause=Cause(
            "optax adds eps under the root unless `eps_in_sqrt=False`, and torch behind it.",
            theirs={"eps_in_sqrt": False},
        ),
    ),
    Row(
        "rmsprop",
        "heavyball",
        "RMSprop",
        {"lr": 0.01, "alpha": 0.99},
        {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, **HEAVYBALL},
        coarsest="float32",
        cause=Cause(
            "heavyball corrects the bias of the average of squares: this is Adam with beta1 = 0.",
            algorithm="adam",
            ours={"lr": 0.01, "betas": (0.0, 0.99)},
        ),
    ),
    Row("rprop", "torch.optim", "Rprop", {"lr": 0.01}, {"lr": 0.01, **SINGLE}),
    Row(
        "rprop",
        "optax",
        "rprop",
        {"lr": 0.01},
        {"learning_rate": 0.01},
        cause=Cause(
            "optax applies the update of the step before, so that its first step moves nothing.",
            variant="rprop_of_this_step",
        ),
    ),
    Row("muon", "torch.optim", "Muon", {"lr": 0.1}, {"lr": 0.1}, shapes="matrices"),
    Row(
        "muon",
        "pytorch_optimizer",
        "Muon",
        {"lr": 0.1},
        {"lr": 0.1, "weight_decay": 0.1, "group": {"use_muon": True}},
        shapes="matrices",
    ),
    Row("nadam", "torch.optim", "NAdam", {"betas": BETAS}, {"betas": BETAS, **SINGLE}),
    Row(
        "nadam",
        "optax",
        "nadam",
        {"lr": 0.01, "betas": BETAS},
        {"learning_rate": 0.01, "b1": 0.9, "b2": 0.99},
        coarsest="float32",
        cause=Cause(
            "optax keeps the momentum constant, and torch lets it grow to beta1 by "
            "`momentum_decay`.",
            ours={"momentum_decay": 1e9},
        ),
    ),
    Row(
        "nadam",
        "heavyball",
        "NAdam",
        {"lr": 0.01, "betas": BETAS},
        {"lr": 0.01, "betas": BETAS, **HEAVYBALL},
        coarsest="float32",
    ),
    Row("radam", "torch.optim", "RAdam", {"betas": BETAS}, {"betas": BETAS, **SINGLE}),
    Row(
        "radam",
        "optax",
        "radam",
        {"lr": 0.01, "betas": BETAS},
        {"learning_rate": 0.01, "b1": 0.9, "b2": 0.99},
        cause=Cause(
            "optax adds eps behind the bias correction, and torch before it.",
            ours={"eps": 0.0},
            theirs={"eps": 0.0},
        ),
    ),
    Row(
        "radam",
        "optimi",
        "RAdam",
        {"lr": 0.01, "betas": BETAS},
        {"lr": 0.01, "betas": BETAS, "eps": 1e-8, **KAHAN},
        cause=Cause(
            "optimi adds eps behind the bias correction, and torch before it.",
            ours={"eps": 0.0},
            theirs={"eps": 0.0},
        ),
    ),
    Row(
        "radam",
        "pytorch_optimizer",
        "RAdam",
        {"lr": 0.01, "betas": BETAS},
        {"lr": 0.01, "betas": BETAS},
        cause=Cause(
            "pytorch-optimizer makes no step before the variance is known unless "
            "`degenerated_to_sgd=True`.",
            theirs={"degenerated_to_sgd": True},
        ),
    ),
    Row("asgd", "torch.optim", "ASGD", {"lr": 0.01, "t0": 5.0}, {"lr": 0.01, "t0": 5.0, **SINGLE}),
    Row("adafactor", "torch.optim", "Adafactor", {"lr": 0.01}, {"lr": 0.01, **SINGLE}),
    Row(
        "adafactor",
        "optax",
        "adafactor",
        {"lr": 0.01},
        {"learning_rate": 0.01, "min_dim_size_to_factor": 1},
        coarsest="float32",
    ),
    Row(
        "adafactor",
        "pytorch_optimizer",
        "AdaFactor",
        {"lr": 0.01},
        {"lr": 0.01, "relative_step": False, "betas": (None, 0.999)},
    ),
]
"""Rows with their options and causes."""
