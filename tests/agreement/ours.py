"""Our side of a row, and the formulas in float64 as another implementation."""

from typing import Any

import torch

import functional_optim
from functional_optim import Optimizer
from functional_optim.testing.inputs import fed
from tests.agreement.problem import STEPS, Problem, Values


def steps(optimizer: Optimizer, given: Problem) -> dict[int, Values]:
    """Return the parameters after each number of steps in ``STEPS``."""
    params = [one.clone() for one in given.params]
    optimizer = fed(optimizer)
    state = optimizer.init(params)
    found = {}
    for step, grads in enumerate(given.grads, start=1):
        params, state = optimizer.update(params, grads, state)
        if step in STEPS:
            found[step] = params
    return found


def built(name: str, options: dict[str, Any]) -> Optimizer:
    """Return an optimizer by the name of its constructor in the package."""
    made: Optimizer = getattr(functional_optim, name)(**options)
    return made


def is_known(name: str) -> bool:
    """Return True if the package has an algorithm of this name."""
    return name in functional_optim.algorithms.__all__


def tensors(values: list[Any]) -> Values:
    """Return lists of numbers as float64 tensors."""
    return [torch.tensor(one, dtype=torch.float64) for one in values]
