"""Torch's functions with a number, for numbers in a tensor.

A compiled step takes the numbers that change with the step as elements of one small tensor, so
that no new value compiles anything anew. torch's own functions want plain numbers in some of
their arguments (``alpha=``, ``value=``); the functions here do the same with 0-d tensors, by
broadcasting, and are compiled in their place. Each computes what torch documents for its namesake.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from functional_optim.numeric import beside

Scalar = float | Tensor


def add(x: Any, y: Any, alpha: Scalar = 1) -> Any:
    """``x + alpha * y``."""
    return x + y if isinstance(alpha, int) and alpha == 1 else x + alpha * y


def sub(x: Any, y: Any, alpha: Scalar = 1) -> Any:
    """``x - alpha * y``."""
    return x - y if isinstance(alpha, int) and alpha == 1 else x - alpha * y


def rsub(x: Any, y: Any, alpha: Scalar = 1) -> Any:
    """``y - alpha * x``."""
    return sub(y, x, alpha)


def lerp(start: Tensor, end: Tensor, weight: Scalar) -> Tensor:
    """``start + weight * (end - start)``, from the nearer end."""
    difference = end - start
    near = start + weight * difference
    far = end - difference * (1 - weight)
    if not isinstance(weight, Tensor):
        return near if abs(weight) < 0.5 else far
    return torch.where(weight.abs() < 0.5, near, far)


def addcmul(x: Tensor, a: Tensor, b: Tensor, value: Scalar = 1) -> Tensor:
    """``x + value * a * b``."""
    return x + (value * a) * b  # in this order: a * b may be too large


def addcdiv(x: Tensor, a: Tensor, b: Tensor, value: Scalar = 1) -> Tensor:
    """``x + value * a / b``."""
    return x + (value * a) / b


def clamp(x: Tensor, min: Any = None, max: Any = None) -> Tensor:  # noqa: A002  torch's names
    """``x`` between two bounds, each a number, a tensor or None; NaN stays NaN."""
    if isinstance(min, Tensor) or isinstance(max, Tensor):
        x = x if min is None else torch.maximum(x, beside(x, min))
        return x if max is None else torch.minimum(x, beside(x, max))
    return torch.clamp(x, min, max)


def masked_fill(x: Tensor, mask: Tensor, value: Scalar) -> Tensor:
    """``value`` where ``mask`` holds, else ``x``."""
    if isinstance(value, Tensor):
        return torch.where(mask, value.to(x.dtype), x)
    return x.masked_fill(mask, value)


def full_like(x: Tensor, fill_value: Scalar, **options: Any) -> Tensor:
    """A tensor like ``x`` that holds one value."""
    if isinstance(fill_value, Tensor):
        return torch.zeros_like(x, **options) + fill_value.to(options.get("dtype", x.dtype))
    return torch.full_like(x, fill_value, **options)


def where(condition: Tensor, x: Any, y: Any) -> Tensor:
    """``x`` where the condition holds, else ``y``; a 0-d tensor takes the dtype of the other."""
    if isinstance(x, Tensor) and isinstance(y, Tensor) and x.dtype != y.dtype:
        if x.dim() == 0:
            x = x.to(y.dtype)
        elif y.dim() == 0:
            y = y.to(x.dtype)
    return torch.where(condition, x, y)


def kept(x: Tensor) -> Tensor:
    """The values of ``x`` as they are now, to be read after it was written over."""
    # Inductor takes a clone for nothing done, and then reads too late.
    return x.logical_not().logical_not() if x.dtype == torch.bool else x.neg().neg()


LOWERED: dict[str, Callable[..., Any]] = {
    "add": add,
    "sub": sub,
    "rsub": rsub,
    "lerp": lerp,
    "addcmul": addcmul,
    "addcdiv": addcdiv,
    "clamp": clamp,
    "clip": clamp,
    "masked_fill": masked_fill,
    "full_like": full_like,
    "where": where,
}
"""What is compiled in place of torch's functions and methods of these names."""


def is_torchs(function: Any, name: str) -> bool:
    """Return True if a function is torch's of this name."""
    return function in (getattr(torch, name, None), getattr(Tensor, name, None))


class Lowered(TorchFunctionMode):
    """torch's functions that want numbers, with numbers in 0-d tensors."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name in LOWERED and is_torchs(function, name):
            function = LOWERED[name]
        return function(*args, **(kwargs or {}))
