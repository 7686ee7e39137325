"""Every algorithm as a contestant: its options, and the problems that it can solve."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import functional_optim
from functional_optim import Optimizer, algorithms, partition
from tests.cases import CASES, INPUT_CASES

REST_RATE = 3e-3
"""Learning rate of AdamW for the parameters that an algorithm for matrices cannot take."""

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "lbfgs": {"line_search_fn": "strong_wolfe", "max_iter": 1},
    "scion": {"unconstrained": True},
    "sgd": {"momentum": 0.9},
    "qhm": {"momentum": 0.9},
}
"""Options that differ from the defaults. With the defaults, the algorithm would be another one, or
would solve another problem. The default of Scion bounds the norm of each matrix."""


SPARSE = ("sparse_adam",)
"""Algorithms that need sparse gradients. Here, the sparse gradients have all rows."""


def names() -> list[str]:
    """Return the names of all algorithms."""
    closures = [name for name in ("lbfgs",) if hasattr(functional_optim, name)]
    return sorted([*algorithms.__all__, *closures])


def takes_matrices_only(name: str) -> bool:
    """Return True if each parameter has to be a matrix."""
    case = CASES.get(name) or INPUT_CASES.get(name)
    return case is not None and case.matrices


def has_rate(name: str) -> bool:
    """Return True if the algorithm has a learning rate to choose."""
    return "lr" in inspect.signature(_constructor(name)).parameters


def build(name: str, rate: float | None, params: Mapping[str, Any]) -> Optimizer:
    """Return an optimizer for these parameters.

    Args:
        name: the name of the algorithm.
        rate: its learning rate, or None for the default.
        params: the parameters by name. AdamW steps vectors and embeddings if the algorithm steps
            only matrices.
    """
    options = dict(OPTIONS.get(name, {}))
    if rate is not None:
        options["lr"] = rate
    optimizer = _constructor(name)(**options)
    if len(params) == 1 or not takes_matrices_only(name):
        return optimizer
    rest = functional_optim.adamw(lr=REST_RATE)
    return partition({"matrices": optimizer, "rest": rest}, label)


def label(path: tuple[Any, ...], shape: tuple[int, ...]) -> str:
    """Return the part that steps a parameter of a model."""
    hidden = len(shape) == 2 and not any("embedding" in str(one) for one in path)
    return "matrices" if hidden else "rest"


def _constructor(name: str) -> Callable[..., Optimizer]:
    found: Callable[..., Optimizer] = getattr(functional_optim, name)
    return found
