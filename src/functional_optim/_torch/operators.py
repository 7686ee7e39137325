"""torch's foreach operators, and its fused steps of optimizers.

Without a foreach operator, the operation runs tensor by tensor. Without a fused step,
``executor="fused"`` raises an error.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from functional_optim._torch.missing_name import MissingName


def _foreach_function(name: str) -> Callable[..., Any] | None:
    """Return torch's foreach function, or None. Names with a trailing underscore are in place."""
    found: Callable[..., Any] | None = getattr(torch, f"_foreach_{name}", None)
    return found


def list_function(name: str) -> Callable[..., Any] | None:
    """Return torch's foreach function, or one that calls the method of each tensor, or None."""
    found = _foreach_function(name)
    return found if found is not None or not hasattr(Tensor, name) else _each(name)


@cache
def _each(name: str) -> Callable[..., list[Tensor]]:
    """Return a function that calls the method of each tensor, with its arguments of each list."""
    method = getattr(Tensor, name)

    def call_each(*args: Any, **options: Any) -> list[Tensor]:
        rows = zip(*(one if isinstance(one, (list, tuple)) else repeat(one) for one in args))  # noqa: B905
        return [method(*row, **options) for row in rows]

    return call_each


def _norm_of_each(tensors: list[Tensor]) -> list[Tensor]:  # TorchScript compiles it
    return [torch.linalg.vector_norm(one) for one in tensors]


def foreach_vector_norm(tensors: list[Tensor], *, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Return ``torch.linalg.vector_norm`` of each tensor, in one call if torch has it."""
    foreach = getattr(torch, "_foreach_norm", None)
    if foreach is None:
        return [torch.linalg.vector_norm(one, dtype=dtype) for one in tensors]
    found: list[Tensor] = foreach(tensors, dtype=dtype)
    return found


def _unscale_each(grads: Sequence[Tensor], is_infinite: Tensor, inverse: Tensor) -> None:
    for one in grads:
        found = torch.isfinite(one).all().logical_not().to(is_infinite)
        is_infinite.copy_(torch.maximum(is_infinite, found))
        one.mul_(inverse)


foreach_abs: Callable[..., Any] = _foreach_function("abs") or _each("abs")
foreach_add: Callable[..., Any] = _foreach_function("add") or _each("add")
foreach_mul: Callable[..., Any] = _foreach_function("mul") or _each("mul")
foreach_sub: Callable[..., Any] = _foreach_function("sub") or _each("sub")
foreach_add_: Callable[..., Any] = _foreach_function("add_") or _each("add_")
"""Add one number to all tensors, in place."""
foreach_mul_: Callable[..., Any] = _foreach_function("mul_") or _each("mul_")
"""Multiply tensors in place: all by a 0-d tensor, or each by its number in a list. (On the CPU,
torch would round one number for all to the dtype of the tensors first.)"""
foreach_divide_: Callable[..., Any] = _foreach_function("div_") or _each("div_")
"""Divide each tensor by its number in a list, in place."""
foreach_copy_: Callable[..., Any] = _foreach_function("copy_") or _each("copy_")
foreach_clone: Callable[..., Any] = _foreach_function("clone") or _each("clone")
foreach_norm: Callable[[list[Tensor]], list[Tensor]] = (
    getattr(torch, "_foreach_norm", None) or _norm_of_each
)
amp_foreach_non_finite_check_and_unscale_: Callable[[Sequence[Tensor], Tensor, Tensor], object] = (
    getattr(torch, "_amp_foreach_non_finite_check_and_unscale_", None) or _unscale_each
)
"""Multiply tensors by the third argument, and set the second to 1 if an element is not finite."""


def _fused(name: str) -> Any:
    without = MissingName(
        f"torch.{name}",
        "executor='fused' cannot step this rule",
        "take executor='auto', whose steps are as fast on the CPU",
    )
    return getattr(torch, name, None) or without


fused_sgd_ = _fused("_fused_sgd_")
fused_adam_ = _fused("_fused_adam_")
fused_adamw_ = _fused("_fused_adamw_")
fused_adagrad_ = _fused("_fused_adagrad_")
