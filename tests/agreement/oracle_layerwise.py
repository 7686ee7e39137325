"""Comparison with the package of Adam-mini's authors, which finds rows by names of parameters.

The package is one of the extra ``oracles``.
"""

import contextlib
import io

import torch

from functional_optim import adam_mini
from tests.agreement.ours import steps
from tests.agreement.problem import DTYPES, STEPS, difference, problem


def compare_adam_mini_with_its_authors() -> float:
    """Return the largest difference for rows of matrices, relative to the change by the package."""
    from adam_mini import Adam_mini

    given = problem(DTYPES[0], "matrices")
    params = [torch.nn.Parameter(one.clone()) for one in given.params]
    named = [(f"mlp.{number}", one) for number, one in enumerate(params)]
    with contextlib.redirect_stdout(io.StringIO()):
        theirs = Adam_mini(named, lr=0.01, weight_decay=0.1, verbose=False)
    for grads in given.grads:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        theirs.step()
    ours = steps(adam_mini(0.01, weight_decay=0.1), given)[max(STEPS)]
    return difference(ours, [one.detach() for one in params], given.params)
