"""The dtype with the fewest digits that a step computes in."""

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from functional_optim.optimizer import Optimizer
from functional_optim.testing.runs import Run


class _DtypeMode(TorchFunctionMode):
    """Notes the dtypes of all floating-point results."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in optree.tree_leaves(found):
            if isinstance(one, Tensor) and one.is_floating_point():
                self.seen.add(one.dtype)
        return found


def coarsest_of(optimizer: Optimizer, run: Run) -> torch.dtype | None:
    """Return the dtype with the fewest digits in which some rule computes.

    One step is made, and its operations are watched.

    Args:
        optimizer: whose rules are looked at.
        run: gives parameters and gradients.

    Returns:
        None if no dtype has fewer digits than the parameters'.
    """
    by_reference = optimizer.using(executor="reference")
    params = run.params()
    state = by_reference.init(params)
    grads = {name: torch.ones_like(param) for name, param in params.items()}
    with _DtypeMode() as mode:
        by_reference.update(params, grads, state)
    found = max(mode.seen, key=_eps, default=run.dtype)
    return found if _eps(found) > _eps(run.dtype) else None


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps
