"""Comparisons with packages of the papers' authors and of others, all on the same problem.

Each function returns the largest difference after 20 steps in float64, relative to the largest
change of the parameter by the other implementation. It imports the package when it runs.
"""

import contextlib
import importlib
import io
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from functional_optim import (
    Optimizer,
    adam_mini,
    came,
    dadapt_adam,
    dadapt_sgd,
    dog,
    ldog,
    novograd,
    sign_sgd,
    signum,
)

SHAPES = ((9,), (6, 5), (4, 10), (2, 3, 4))
STEPS = 20
Values = list[Tensor]


def problem(shapes: tuple[tuple[int, ...], ...] = SHAPES) -> tuple[Values, list[Values]]:
    """Return parameters, and gradients for each step: a slope that changes slowly, plus noise."""
    generator = torch.Generator().manual_seed(0)

    def drawn() -> Values:
        return [torch.randn(one, generator=generator, dtype=torch.float64) for one in shapes]

    params = drawn()
    return params, [
        [(1 - step / 8) * p + 0.3 * g for p, g in zip(params, drawn(), strict=True)]
        for step in range(STEPS)
    ]


def difference(ours: Values, theirs: Values, start: Values) -> float:
    """Return the largest difference, relative to the largest change of the same tensor."""
    pairs = zip(ours, theirs, start, strict=True)
    return max(float((a - b).abs().max() / (b - c).abs().max()) for a, b, c in pairs)


def stepped(optimizer: Optimizer, params: Values, grads: list[Values]) -> Values:
    state = optimizer.init(params)
    for one in grads:
        params, state = optimizer.update(params, one, state)
    return params


def with_torch(
    optimizer: Optimizer,
    package: str,
    name: str,
    *,
    named: bool = False,
    shapes: tuple[tuple[int, ...], ...] = SHAPES,
    **options: Any,
) -> float:
    """Compare with a torch.optim.Optimizer. Gradients are cloned, since some write to them."""
    start, grads = problem(shapes)
    build = getattr(importlib.import_module(package), name)
    params = [torch.nn.Parameter(one.clone()) for one in start]
    given: Any = [(f"mlp.{k}", one) for k, one in enumerate(params)] if named else params
    with contextlib.redirect_stdout(io.StringIO()):
        theirs = build(given, **options)
    for step in grads:
        for param, grad in zip(params, step, strict=True):
            param.grad = grad.clone()
        theirs.step()
    return difference(stepped(optimizer, start, grads), [one.detach() for one in params], start)


def with_optax(optimizer: Optimizer, name: str, **options: Any) -> float:
    """Compare with a transformation of optax."""
    jax: Any = importlib.import_module("jax")
    optax: Any = importlib.import_module("optax")
    jax.config.update("jax_enable_x64", True)
    start, grads = problem()
    theirs = reduce(getattr, name.split("."), optax)(**options)
    params = [jax.numpy.asarray(one.numpy()) for one in start]
    state = theirs.init(params)
    for step in grads:
        given = [jax.numpy.asarray(one.numpy()) for one in step]
        updates, state = theirs.update(given, state, params)
        params = optax.apply_updates(params, updates)
    found = [torch.tensor(one.tolist(), dtype=torch.float64) for one in params]
    return difference(stepped(optimizer, start, grads), found, start)


def compare_sign_sgd_with_optax() -> float:
    return with_optax(sign_sgd(0.1), "sign_sgd", learning_rate=0.1)


def compare_signum_with_pytorch_optimizer() -> float:
    return with_torch(signum(0.1, 0.9), "pytorch_optimizer", "SignSGD", lr=0.1, momentum=0.9)


def compare_novograd_with_optax() -> float:
    return with_optax(
        novograd(0.1, weight_decay=0.01),
        "novograd",
        learning_rate=0.1,
        b1=0.95,
        b2=0.98,
        eps=1e-8,
        weight_decay=0.01,
    )


def compare_came_with_its_authors() -> float:
    return with_torch(
        came(0.01, weight_decay=0.1), "came_pytorch", "CAME", lr=0.01, weight_decay=0.1
    )


def compare_adam_mini_with_its_authors() -> float:
    """Compare rows of matrices. The package finds the rows by the names of the parameters."""
    return with_torch(
        adam_mini(0.01, weight_decay=0.1),
        "adam_mini",
        "Adam_mini",
        named=True,
        shapes=((6, 5), (4, 10)),
        lr=0.01,
        weight_decay=0.1,
        verbose=False,
    )


def compare_dog_with_its_authors() -> float:
    """Compare from a first distance so large that rounding does not hide it."""
    return with_torch(
        dog(reps_rel=0.1, weight_decay=0.01), "dog", "DoG", reps_rel=0.1, weight_decay=0.01
    )


def compare_dog_with_optax() -> float:
    return with_optax(dog(reps_rel=0.1), "contrib.dog", init_step=("heuristic", 0.1))


def compare_ldog_with_its_authors() -> float:
    return with_torch(
        ldog(reps_rel=0.1, weight_decay=0.01), "dog", "LDoG", reps_rel=0.1, weight_decay=0.01
    )


def compare_dadapt_sgd_with_its_authors() -> float:
    """Compare without decay, since the package omits the decay from the first gradient norm."""
    return with_torch(
        dadapt_sgd(momentum=0.9, d0=1e-3), "dadaptation", "DAdaptSGD", momentum=0.9, d0=1e-3
    )


def compare_dadapt_adam_with_its_authors() -> float:
    return with_torch(
        dadapt_adam(weight_decay=0.1, decouple=True, use_bias_correction=True, d0=1e-3),
        "dadaptation",
        "DAdaptAdam",
        weight_decay=0.1,
        decouple=True,
        use_bias_correction=True,
        d0=1e-3,
    )


def compare_dadapt_adam_with_optax() -> float:
    return with_optax(
        dadapt_adam(weight_decay=0.1, decouple=True, use_bias_correction=True, d0=1e-3),
        "contrib.dadapt_adamw",
        estim_lr0=1e-3,
        weight_decay=0.1,
    )
