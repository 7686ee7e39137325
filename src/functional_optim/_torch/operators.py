"""torch's foreach operators, and its fused steps of optimizers.

Without a foreach operator, the operation runs tensor by tensor. Without a fused step,
``executor="fused"`` raises an error.
"""

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from functional_optim._torch.missing_name import MissingName


def _add_to_each(tensors: Sequence[Tensor], number: float) -> None:
    for one in tensors:
        one.add_(number)


def _multiply_each(tensors: Sequence[Tensor], number: Tensor) -> None:
    for one in tensors:
        one.mul_(number)


def _clone_of_each(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [one.clone() for one in tensors]


def _copy_to_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _norm_of_each(tensors: list[Tensor]) -> list[Tensor]:  # TorchScript compiles it
    return [torch.linalg.vector_norm(one) for one in tensors]


def foreach_vector_norm(
    tensors: list[Tensor], order: float = 2.0, *, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Return ``torch.linalg.vector_norm`` of each tensor, in one call if torch has it."""
    foreach = getattr(torch, "_foreach_norm", None)
    if foreach is None:
        return [torch.linalg.vector_norm(one, order, dtype=dtype) for one in tensors]
    found: list[Tensor] = foreach(tensors, order, dtype=dtype)
    return found


def _divide_each(tensors: Sequence[Tensor], divisors: Sequence[float]) -> None:
    for one, divisor in zip(tensors, divisors, strict=True):
        one.div_(divisor)


def _scale_each(tensors: Sequence[Tensor], factors: Sequence[float]) -> None:
    for one, factor in zip(tensors, factors, strict=True):
        one.mul_(factor)


def _unscale_each(grads: Sequence[Tensor], is_infinite: Tensor, inverse: Tensor) -> None:
    for one in grads:
        found = torch.isfinite(one).all().logical_not().to(is_infinite)
        is_infinite.copy_(torch.maximum(is_infinite, found))
        one.mul_(inverse)


foreach_add_: Callable[[Sequence[Tensor], float], object] = (
    getattr(torch, "_foreach_add_", None) or _add_to_each
)
foreach_scale_: Callable[[Sequence[Tensor], Sequence[float]], object] = (
    getattr(torch, "_foreach_mul_", None) or _scale_each
)
"""Multiply each tensor by its number, in place."""
foreach_divide_: Callable[[Sequence[Tensor], Sequence[float]], object] = (
    getattr(torch, "_foreach_div_", None) or _divide_each
)
"""Divide each tensor by its number, in place."""
foreach_mul_: Callable[[Sequence[Tensor], Tensor], object] = (
    getattr(torch, "_foreach_mul_", None) or _multiply_each
)
"""Multiply all tensors by a 0-d tensor, in place. (On the CPU, torch would round a number to the
dtype of the tensors first.)"""
foreach_copy_: Callable[[Sequence[Tensor], Sequence[Tensor]], object] = (
    getattr(torch, "_foreach_copy_", None) or _copy_to_each
)
foreach_clone: Callable[[Sequence[Tensor]], Sequence[Tensor]] = (
    getattr(torch, "_foreach_clone", None) or _clone_of_each
)
foreach_norm: Callable[[list[Tensor]], list[Tensor]] = (
    getattr(torch, "_foreach_norm", None) or _norm_of_each
)
amp_foreach_non_finite_check_and_unscale_: Callable[[Sequence[Tensor], Tensor, Tensor], object] = (
    getattr(torch, "_amp_foreach_non_finite_check_and_unscale_", None) or _unscale_each
)
"""Multiply tensors by the third argument, and set the second to 1 if an element is not finite."""


def call_foreach(name: str, first: Sequence[Tensor], *args: Any, **options: Any) -> list[Tensor]:
    """Apply a function of torch to each tensor, in one foreach call if torch has it.

    Args:
        name: of a function of torch, such as "add".
        first: the first argument for each call.
        args: other arguments: a list with one tensor for each call, or one value for all calls.
        options: keyword arguments for all calls.
    """
    foreach = foreach_function(name)
    if foreach is not None:
        return list(foreach(first, *args, **options))
    function = getattr(torch, name)
    rows = zip(*(one if isinstance(one, list) else repeat(one) for one in (first, *args)))  # noqa: B905
    return [function(*row, **options) for row in rows]


def foreach_function(name: str) -> Callable[..., Any] | None:
    """Return torch's foreach function, or None. Names with a trailing underscore are in place."""
    found: Callable[..., Any] | None = getattr(torch, f"_foreach_{name}", None)
    return found


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
