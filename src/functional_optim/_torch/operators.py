"""Operators on many tensors in one call, and torch's fused steps of optimizers.

torch.optim calls them too. Without the first ones: the same operation, tensor by tensor. The fused
ones are what executor="fused" is, so there is nothing else to do without them.
"""

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from functional_optim._torch.missing import Missing


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
    """``torch.linalg.vector_norm`` of each, by one call where torch has it."""
    at_once = getattr(torch, "_foreach_norm", None)
    if at_once is None:
        return [torch.linalg.vector_norm(one, order, dtype=dtype) for one in tensors]
    found: list[Tensor] = at_once(tensors, order, dtype=dtype)
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
"""By a 0-d tensor: on the CPU, a number is rounded to the tensors' dtype before it multiplies."""
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
"""As GradScaler does: multiply, and set the second argument to 1 where some are not finite."""


def each(name: str, first: Sequence[Tensor], *args: Any, **options: Any) -> list[Tensor]:
    """Return what torch's function of this name makes of each tensor, by one call where it can.

    Args:
        name: of a function of torch that has a form for lists, such as "add".
        first: the tensors.
        args: a list with a tensor for each of them, or what is the same for all.
        options: likewise, the same for all.
    """
    at_once = foreach_function(name)
    if at_once is not None:
        return list(at_once(first, *args, **options))
    alone = getattr(torch, name)
    rows = zip(*(one if isinstance(one, list) else repeat(one) for one in (first, *args)))  # noqa: B905
    return [alone(*row, **options) for row in rows]


def foreach_function(name: str) -> Callable[..., Any] | None:
    """Return torch's function of this name for lists of tensors.

    Behind an underscore, the one that writes over the first list. Without it, or where there is
    none: None, and each is done alone.
    """
    found: Callable[..., Any] | None = getattr(torch, f"_foreach_{name}", None)
    return found


def _fused(name: str) -> Any:
    without = Missing(
        f"torch.{name}",
        "executor='fused' cannot step this rule",
        "take executor='auto', whose steps are as fast on the CPU",
    )
    return getattr(torch, name, None) or without


fused_sgd_ = _fused("_fused_sgd_")
fused_adam_ = _fused("_fused_adam_")
fused_adamw_ = _fused("_fused_adamw_")
fused_adagrad_ = _fused("_fused_adagrad_")
