"""Rows of algorithms that torch.optim does not have."""

from tests.agreement.row import Cause, Row, alike, in_optax

BETAS = (0.9, 0.99)
KAHAN = {"kahan_sum": False, "foreach": False, "triton": False}
HEAVYBALL = {"multi_tensor": False, "compile_step": False, "promote": False}
HESSIAN = {"betas": BETAS, "weight_decay": 0.01}

ROWS = [
    alike("lion", "lion_pytorch", "Lion", {"lr": 0.01, "weight_decay": 0.1}),
    in_optax("lion", "lion", {"lr": 0.01, "weight_decay": 0.1}),
    alike("lion", "optimi", "Lion", {"lr": 0.01, "weight_decay": 0.1}, KAHAN),
    alike("lion", "pytorch_optimizer", "Lion", {"lr": 0.01, "weight_decay": 0.1}),
    in_optax("lamb", "lamb", {"lr": 0.1}, {"weight_decay": 0.01}),
    alike(
        "lamb",
        "pytorch_optimizer",
        "Lamb",
        {"lr": 0.1},
        {"weight_decay": 0.01, "max_grad_norm": 0.0, "weight_decouple": False},
        cause=Cause(
            "pytorch-optimizer does not correct the average of squares, and corrects that of "
            "gradients behind the trust ratio, whose norm it adds eps to.",
            ours={"betas": (0.0, 0.0), "eps": 0.0},
            theirs={"betas": (0.0, 0.0), "eps": 0.0},
        ),
    ),
    in_optax("lars", "lars", {"lr": 1.0, "weight_decay": 0.01}),
    alike(
        "lars",
        "pytorch_optimizer",
        "LARS",
        {"lr": 1.0, "weight_decay": 0.01},
        cause=Cause(
            "pytorch-optimizer does not scale vectors, and divides by the sum of the norms of "
            "gradient and decay, where ours divides by the norm of their sum.",
            ours={"weight_decay": 0.0},
            theirs={"weight_decay": 0.0},
            shapes="matrices",
        ),
    ),
    alike("qhm", "pytorch_optimizer", "QHM", {"lr": 0.1, "momentum": 0.9}, {"nu": 0.7}),
    Row(
        "ftrl",
        "pytorch_optimizer",
        "FTRL",
        {"lr": 0.1, "l1": 0.01, "l2": 0.01},
        {"lr": 0.1, "beta": 1.0, "lambda_1": 0.01, "lambda_2": 0.01},
    ),
    alike(
        "soap",
        "pytorch_optimizer",
        "SOAP",
        {"lr": 0.1},
        shapes="matrices",
        coarsest="float32",
        cause=Cause(
            "pytorch-optimizer does not decay weights in the first step, decays them behind the "
            "update, adds eps before the bias correction, and in float32 chooses other "
            "eigenvectors where a side that is longer than the other has several eigenvalues 0.",
            ours={"weight_decay": 0.0, "eps": 0.0},
            theirs={"weight_decay": 0.0, "eps": 0.0},
            shapes="square",
        ),
    ),
    alike(
        "soap",
        "heavyball",
        "SOAP",
        {"lr": 0.1, "precondition_frequency": 2},
        {"betas": (0.95, 0.95), "merge_dims": False, "use_precond_schedule": False, **HEAVYBALL},
        shapes="matrices",
        coarsest="float32",
        cause=Cause(
            "heavyball refreshes the basis at other steps, and chooses other eigenvectors where "
            "a side that is longer than the other has several eigenvalues 0.",
            ours={"precondition_frequency": 100, "weight_decay": 0.0},
            theirs={"precondition_frequency": 100, "weight_decay": 0.0},
            shapes="square",
        ),
    ),
    alike("prodigy", "prodigyopt", "Prodigy", {"d0": 0.01}),
    Row(
        "prodigy",
        "optax",
        "contrib.prodigy",
        {"d0": 0.01},
        {"estim_lr0": 0.01},
        cause=Cause(
            "optax always has the bias correction, which the authors' default leaves out.",
            ours={"use_bias_correction": True},
        ),
    ),
    alike("prodigy", "pytorch_optimizer", "Prodigy", {"d0": 0.01}, coarsest="float32"),
    alike("schedule_free_sgd", "schedulefree", "SGDScheduleFree", {"lr": 0.1}, {"foreach": False}),
    in_optax("schedule_free_sgd", "contrib.schedule_free_sgd", {"lr": 0.1}),
    alike("schedule_free_sgd", "pytorch_optimizer", "ScheduleFreeSGD", {"lr": 0.1}),
    alike(
        "schedule_free_adamw", "schedulefree", "AdamWScheduleFree", {"lr": 0.1}, {"foreach": False}
    ),
    in_optax("schedule_free_adamw", "contrib.schedule_free_adamw", {"lr": 0.1}),
    alike("schedule_free_adamw", "pytorch_optimizer", "ScheduleFreeAdamW", {"lr": 0.1}),
    alike(
        "schedule_free_adamw",
        "heavyball",
        "SFAdamW",
        {"lr": 0.1},
        {"betas": (0.9, 0.999), "eps": 1e-8, **HEAVYBALL},
        coarsest="float32",
    ),
    in_optax(
        "sophia",
        "contrib.sophia",
        {"lr": 0.1, **HESSIAN},
        {"eps": 1e-12, "update_interval": 1, "hessian_diagonal_fn": None},
        inputs=True,
        cause=Cause(
            "optax corrects the bias of the average of gradients, and uses the average of "
            "Hessians of the step before.",
            variant="sophia_with_this_hessian",
        ),
    ),
    Row(
        "sophia",
        "pytorch_optimizer",
        "SophiaH",
        {"lr": 0.1, "gamma": 1.0, **HESSIAN},
        {"lr": 0.1, "p": 1.0, **HESSIAN},
        inputs=True,
    ),
    alike(
        "adahessian",
        "pytorch_optimizer",
        "AdaHessian",
        {"lr": 0.1, "eps": 1e-8, **HESSIAN},
        inputs=True,
    ),
]
"""Rows with their options and causes."""
