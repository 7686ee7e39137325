"""Runner for the rows of one package: ``python -m tests.agreement.peer PACKAGE``.

The process writes one JSON object. For each row, experiment and dtype, the object has the
parameters after each number of steps, or the error that the package raised. Each package has its
own process, so that no package can change the settings of torch for another.
"""

import contextlib
import importlib
import json
import sys
import warnings
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from tests.agreement.problem import DTYPES, STEPS, Problem, problem
from tests.agreement.row import Row
from tests.agreement.rows import rows, variant

HESSIAN = -0.75
"""Ratio of the estimate of the Hessian's diagonal to the gradient, as in the laws."""

Found = dict[int, list[Tensor]]
"""Parameters, by the number of steps."""


def of_torch(row: Row, given: Problem) -> Found:
    """Run a torch.optim.Optimizer on a problem."""
    params = [torch.nn.Parameter(one.clone()) for one in given.params]
    options = {**row.theirs}
    group = {"params": params, **options.pop("group", {})}
    optimizer = _build(row)([group], **options)
    if hasattr(optimizer, "train"):
        optimizer.train()
    found = {}
    for step, grads in enumerate(given.grads, start=1):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()  # some implementations overwrite the gradient
        optimizer.step(**_inputs(row, grads))
        if step in STEPS:
            found[step] = [one.detach().clone() for one in params]
    return found


def of_optax(row: Row, given: Problem) -> Found:
    """Run a gradient transformation of optax on a problem."""
    import jax
    import optax
    from jax import numpy as jnp

    jax.config.update("jax_enable_x64", True)
    options = {**row.theirs}
    if "hessian_diagonal_fn" in options:
        options["hessian_diagonal_fn"] = _hessian_of_optax(optax)
    transformation = _build(row)(**options)
    params = [jnp.asarray(one.numpy()) for one in given.params]
    state = transformation.init(params)

    def update(grads: Any, state: Any, params: Any) -> Any:
        updates, state = transformation.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    compiled, found = jax.jit(update), {}
    for step, grads in enumerate(given.grads, start=1):
        params, state = compiled([jnp.asarray(one.numpy()) for one in grads], state, params)
        if step in STEPS:
            found[step] = [torch.tensor(one.tolist(), dtype=torch.float64) for one in params]
    return found


def _hessian_of_optax(optax: Any) -> Any:
    """Return a transformation whose output is the estimate of the Hessian's diagonal."""
    return optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(),
        lambda grads, state, params=None, **_: ([HESSIAN * one for one in grads], state),
    )


def _build(row: Row) -> Callable[..., Any]:
    if row.name.startswith("variants."):
        return variant(row.name.removeprefix("variants."))
    package = importlib.import_module(row.package)
    if row.package == "heavyball":
        package.utils.compile_mode = None
    built: Callable[..., Any] = reduce(getattr, row.name.split("."), package)
    return built


def _inputs(row: Row, grads: list[Tensor]) -> dict[str, Any]:
    return {"hessian": [HESSIAN * one for one in grads]} if row.inputs else {}


def results(package: str) -> dict[str, dict[str, Any]]:
    """Return the results of all rows of a package, and of their experiments."""
    found: dict[str, dict[str, Any]] = {}
    for key, row in rows().items():
        if row.package == package:
            kinds = {"": row} if row.cause is None else {"": row, "without": row.experiment()}
            for kind, one in kinds.items():
                found[f"{key} {kind}".strip()] = {
                    str(dtype): _tried(one, dtype) for dtype in DTYPES
                }
    return found


def _tried(row: Row, dtype: torch.dtype) -> Any:
    run = of_optax if row.package == "optax" else of_torch
    try:
        found = run(row, problem(dtype, row.shapes))
    except Exception as error:  # noqa: BLE001  whatever another package raises is its result
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return {str(step): [one.tolist() for one in values] for step, values in found.items()}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(sys.stderr):  # some packages print in their constructors
        answer = results(sys.argv[1])
    json.dump(answer, sys.stdout)
