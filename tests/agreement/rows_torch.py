"""Rows of algorithms that torch.optim has, too."""

from tests.agreement.row import Cause, Row, alike, in_optax

BETAS = (0.9, 0.99)
SINGLE = {"foreach": False}
KAHAN = {"kahan_sum": False, "foreach": False, "triton": False}
HEAVYBALL = {"multi_tensor": False, "compile_step": False, "promote": False}

ROWS = [
    alike("sgd", "torch.optim", "SGD", {"lr": 0.1, "momentum": 0.9}, SINGLE),
    in_optax("sgd", "sgd", {"lr": 0.1, "momentum": 0.9}),
    alike("sgd", "optimi", "SGD", {"lr": 0.1, "momentum": 0.9}, KAHAN),
    alike("sgd", "pytorch_optimizer", "SGDW", {"lr": 0.1, "momentum": 0.9}),
    Row(
        "sgd",
        "heavyball",
        "SGD",
        {"lr": 0.1, "momentum": 0.9},
        {"lr": 0.1, "beta": 0.9, **HEAVYBALL},
        coarsest="float32",
    ),
    alike("adam", "torch.optim", "Adam", {"lr": 0.1, "betas": BETAS}, SINGLE),
    in_optax("adam", "adam", {"lr": 0.1, "betas": BETAS}),
    alike("adam", "optimi", "Adam", {"lr": 0.1, "betas": BETAS}, {"eps": 1e-8, **KAHAN}),
    alike("adamw", "torch.optim", "AdamW", {"lr": 0.1, "betas": BETAS}, SINGLE),
    in_optax("adamw", "adamw", {"lr": 0.1, "betas": BETAS}, {"weight_decay": 0.01}),
    alike(
        "adamw",
        "optimi",
        "AdamW",
        {"lr": 0.1, "betas": BETAS},
        {"weight_decay": 0.01, "eps": 1e-8, **KAHAN},
    ),
    alike(
        "adamw",
        "heavyball",
        "AdamW",
        {"lr": 0.1, "betas": BETAS},
        {"weight_decay": 0.01, **HEAVYBALL},
        coarsest="float32",
    ),
    alike("adagrad", "torch.optim", "Adagrad", {"lr": 0.1, "eps": 1e-7}, SINGLE),
    in_optax(
        "adagrad",
        "adagrad",
        {"lr": 0.1, "eps": 1e-7},
        {"initial_accumulator_value": 0.0},
        cause=Cause(
            "optax adds eps under the root, and torch behind it.",
            ours={"eps": 0.0, "eps_root": 1e-7},
        ),
    ),
    alike("adadelta", "torch.optim", "Adadelta", {"lr": 1.0}, SINGLE),
    in_optax("adadelta", "adadelta", {"lr": 1.0}),
    alike("adadelta", "pytorch_optimizer", "AdaDelta", {"lr": 1.0}),
    alike("adamax", "torch.optim", "Adamax", {"lr": 0.1}, SINGLE),
    in_optax("adamax", "adamax", {"lr": 0.1}),
    alike("adamax", "pytorch_optimizer", "AdaMax", {"lr": 0.1}),
    alike("rmsprop", "torch.optim", "RMSprop", {"lr": 0.01}, SINGLE),
    in_optax(
        "rmsprop",
        "rmsprop",
        {"lr": 0.01},
        {"decay": 0.99},
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
    alike("rprop", "torch.optim", "Rprop", {"lr": 0.01}, SINGLE),
    in_optax(
        "rprop",
        "rprop",
        {"lr": 0.01},
        cause=Cause(
            "optax applies the update of the step before, so that its first step moves nothing.",
            variant="rprop_of_this_step",
        ),
    ),
    alike("muon", "torch.optim", "Muon", {"lr": 0.1}, shapes="matrices"),
    alike(
        "muon",
        "pytorch_optimizer",
        "Muon",
        {"lr": 0.1},
        {"weight_decay": 0.1, "group": {"use_muon": True}},
        shapes="matrices",
    ),
    alike("nadam", "torch.optim", "NAdam", {"betas": BETAS}, SINGLE),
    in_optax(
        "nadam",
        "nadam",
        {"lr": 0.01, "betas": BETAS},
        coarsest="float32",
        cause=Cause(
            "optax keeps the momentum constant, and torch lets it grow to beta1 by "
            "`momentum_decay`.",
            ours={"momentum_decay": 1e9},
        ),
    ),
    alike(
        "nadam", "heavyball", "NAdam", {"lr": 0.01, "betas": BETAS}, HEAVYBALL, coarsest="float32"
    ),
    alike("radam", "torch.optim", "RAdam", {"betas": BETAS}, SINGLE),
    in_optax(
        "radam",
        "radam",
        {"lr": 0.01, "betas": BETAS},
        cause=Cause(
            "optax adds eps behind the bias correction, and torch before it.",
            ours={"eps": 0.0},
            theirs={"eps": 0.0},
        ),
    ),
    alike(
        "radam",
        "optimi",
        "RAdam",
        {"lr": 0.01, "betas": BETAS},
        {"eps": 1e-8, **KAHAN},
        cause=Cause(
            "optimi adds eps behind the bias correction, and torch before it.",
            ours={"eps": 0.0},
            theirs={"eps": 0.0},
        ),
    ),
    alike(
        "radam",
        "pytorch_optimizer",
        "RAdam",
        {"lr": 0.01, "betas": BETAS},
        cause=Cause(
            "pytorch-optimizer makes no step before the variance is known unless "
            "`degenerated_to_sgd=True`.",
            theirs={"degenerated_to_sgd": True},
        ),
    ),
    alike("asgd", "torch.optim", "ASGD", {"lr": 0.01, "t0": 5.0}, SINGLE),
    alike("adafactor", "torch.optim", "Adafactor", {"lr": 0.01}, SINGLE),
    in_optax(
        "adafactor", "adafactor", {"lr": 0.01}, {"min_dim_size_to_factor": 1}, coarsest="float32"
    ),
    alike(
        "adafactor",
        "pytorch_optimizer",
        "AdaFactor",
        {"lr": 0.01},
        {"relative_step": False, "betas": (None, 0.999)},
    ),
]
"""Rows with their options and causes."""
