"""Check of pointwise chains: ``rule(concat) == concat(rule)`` for a few elements."""

from dataclasses import replace

import torch
from torch import Tensor

from functional_optim.core.leaf import needs_total
from functional_optim.kernels.cache import Cache
from functional_optim.kernels.errors import NotPointwiseError
from functional_optim.optimizer import Optimizer

_PARAM = (0.5, -1.25, 2.0, 0.0, 3.5, -0.75)
_GRADS = ((1.0, -2.0, 0.25, 4.0, -0.5, 0.0), (-3.0, 0.5, 1.5, -1.0, 2.0, 0.125))


def require_pointwise(optimizer: Optimizer) -> None:
    """Check that a chain of pointwise stages works on each element separately.

    Two to six elements are stepped together and in two parts, and the results are compared. Each
    chain is checked once, since its numbers may change in each step. It is checked again if other
    numbers are zero.

    Args:
        optimizer: the optimizer. It is not checked if a stage is no pointwise stage, or needs a
            total.

    Raises:
        ValueError: (:class:`NotPointwiseError`) the chain is not pointwise. The error has the
            smallest example.
    """
    stages = optimizer.stages
    if any(stage.kind != "pointwise" or needs_total(stage) for stage in stages):
        return
    if any(stage.dtypes or stage.granularity > 1 for stage in stages):
        return
    values = [value for link in optimizer.links for value in link.hyper]
    key = (
        stages,
        tuple(bool(one) if isinstance(one, (bool, int, float)) else None for one in values),
    )
    # Overrides only change numbers, and may select no leaf in a tree of one tensor.
    alone = replace(optimizer, executor="reference", overrides=())
    _CHECKED.get_or_make(key, lambda: _check(alone))


_CHECKED: Cache[None] = Cache()
"""Chains that are pointwise: their stages, and which of their numbers are not zero."""


def _check(optimizer: Optimizer) -> None:
    for count in range(2, len(_PARAM) + 1):
        for steps in range(1, len(_GRADS) + 1):
            whole = _run(optimizer, slice(0, count), steps)
            parts = [_run(optimizer, part, steps) for part in (slice(0, 1), slice(1, count))]
            if not torch.equal(whole, torch.cat(parts)):
                raise NotPointwiseError(
                    f"the chain {optimizer} declares that it is pointwise, but stepping a "
                    f"parameter in two parts changes the result: from {list(_PARAM[:count])} with "
                    f"gradients {[list(grad[:count]) for grad in _GRADS[:steps]]}, the result is "
                    f"{whole.tolist()}, and in parts {torch.cat(parts).tolist()}; give the stage "
                    "that computes with more than one element kind='per_matrix'"
                )


def _run(optimizer: Optimizer, part: slice, steps: int) -> Tensor:
    """Return a part of the example elements after some steps."""
    with torch.no_grad():
        param = torch.tensor(_PARAM[part], dtype=torch.float64)
        state = optimizer.init(param)
        for grad in _GRADS[:steps]:
            given = torch.tensor(grad[part], dtype=torch.float64)
            param, state = optimizer.update(param, given, state)
    found: Tensor = param
    return found
