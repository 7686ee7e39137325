"""Arithmetic that takes its scalar as a number or as a 0-d tensor.

A number goes to torch's own scalar argument (``alpha=``, ``value=``): one kernel, and bit for
bit what torch.optim does. A 0-d tensor goes through broadcasting instead, so that one can
differentiate with respect to it or vmap over it. TorchScript compiles the first branch only.

The scalar is brought to the dtype of ``x``, so that results never change dtype: 0-d parameters
would otherwise be promoted by a double-precision coefficient.
"""

from typing import Any

import torch
from torch import Tensor


def add(x: Tensor, y: Tensor, alpha: float) -> Tensor:
    """``x + alpha * y``."""
    if not torch.jit.is_scripting():
        if isinstance(alpha, Tensor):
            return x + alpha.to(x.dtype) * y
    return torch.add(x, y, alpha=alpha)


def mul(x: Tensor, factor: float) -> Tensor:
    """``factor * x``."""
    if not torch.jit.is_scripting():
        if isinstance(factor, Tensor):
            return x * factor.to(x.dtype)
    return x * factor


def div(x: Tensor, divisor: float) -> Tensor:
    """``x / divisor``."""
    if not torch.jit.is_scripting():
        if isinstance(divisor, Tensor):
            return x / divisor.to(x.dtype)
    return x / divisor


def shift(x: Tensor, offset: float) -> Tensor:
    """``x + offset``."""
    if not torch.jit.is_scripting():
        if isinstance(offset, Tensor):
            return x + offset.to(x.dtype)
    return x + offset


def lerp(start: Tensor, end: Tensor, weight: float) -> Tensor:
    """``start + weight * (end - start)``."""
    if not torch.jit.is_scripting():
        if isinstance(weight, Tensor):
            return start + weight.to(start.dtype) * (end - start)
    return torch.lerp(start, end, weight)


def addcmul(x: Tensor, a: Tensor, b: Tensor, value: float) -> Tensor:
    """``x + value * a * b``."""
    if not torch.jit.is_scripting():
        if isinstance(value, Tensor):
            return x + value.to(x.dtype) * (a * b)
    return torch.addcmul(x, a, b, value=value)


def addcdiv(x: Tensor, numerator: Tensor, denominator: Tensor, value: float) -> Tensor:
    """``x + value * numerator / denominator``."""
    if not torch.jit.is_scripting():
        if isinstance(value, Tensor):
            return x + value.to(x.dtype) * (numerator / denominator)
    return torch.addcdiv(x, numerator, denominator, value=value)


def clamp(x: Tensor, low: float, high: float) -> Tensor:
    """``min(max(x, low), high)``; NaN stays NaN."""
    if not torch.jit.is_scripting():
        if any(isinstance(bound, Tensor) for bound in (low, high)):
            bottom = torch.as_tensor(low, dtype=x.dtype, device=x.device)
            top = torch.as_tensor(high, dtype=x.dtype, device=x.device)
            return torch.minimum(torch.maximum(x, bottom), top)
    return torch.clamp(x, low, high)


def select(x: Tensor, mask: Tensor, value: float) -> Tensor:
    """``value`` where ``mask`` holds, else ``x``."""
    if not torch.jit.is_scripting():
        if isinstance(value, Tensor):
            return torch.where(mask, value.to(x.dtype), x)
    return x.masked_fill(mask, value)


def fill_like(x: Tensor, value: Any) -> Tensor:
    """A tensor of the shape, dtype, device and strides of ``x`` that holds ``value``.

    For ``init``, so ``value`` may also be a schedule, of which it takes the first value.
    """
    if isinstance(value, Tensor):
        return torch.zeros_like(x) + value.to(x.dtype)
    if callable(value):
        return fill_like(x, value(0))
    return torch.full_like(x, value)


def at_first_step(step: float, first: float, later: float) -> float:
    """``first`` when ``step`` is 1, else ``later``; ``step`` may be a 0-d (or batched) tensor."""
    if not torch.jit.is_scripting():
        if isinstance(step, Tensor):
            a = torch.as_tensor(first, dtype=step.dtype, device=step.device)
            b = torch.as_tensor(later, dtype=step.dtype, device=step.device)
            return torch.where(step == 1, a, b)
    if step == 1.0:
        return first
    return later


def is_active(value: float) -> bool:
    """Whether a number does anything; a tensor or a schedule is taken to."""
    if not torch.jit.is_scripting():
        if not isinstance(value, float):
            return True
    return value != 0.0
