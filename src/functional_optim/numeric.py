"""Arithmetic that takes its scalar as a number or as a 0-d tensor.

A number goes to torch's own scalar argument (``alpha=``, ``value=``): one kernel, and bit for
bit what torch.optim does. A 0-d tensor goes through broadcasting instead, so that one can
differentiate with respect to it or vmap over it. TorchScript compiles the first branch only.

Results have the dtype of ``x``: 0-d parameters would otherwise be promoted by a double-precision
coefficient. With 16-bit floats it is computed in float32 meanwhile where torch's kernels do so with
a scalar argument: they round it in ``x + offset`` only.
"""

from typing import Any

import torch
from torch import Tensor


def add(x: Tensor, y: Tensor, alpha: float) -> Tensor:
    """``x + alpha * y``."""
    if not torch.jit.is_scripting():
        if isinstance(alpha, Tensor):
            wide = _wide(x)
            return (wide + alpha.to(wide.dtype) * _wide(y)).to(x.dtype)
    return torch.add(x, y, alpha=alpha)


def mul(x: Tensor, factor: float) -> Tensor:
    """``factor * x``."""
    if not torch.jit.is_scripting():
        if isinstance(factor, Tensor):
            wide = _wide(x)
            return (wide * factor.to(wide.dtype)).to(x.dtype)
    return x * factor


def div(x: Tensor, divisor: float) -> Tensor:
    """``x / divisor``."""
    if not torch.jit.is_scripting():
        if isinstance(divisor, Tensor):
            wide = _wide(x)
            return (wide / divisor.to(wide.dtype)).to(x.dtype)
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
            wide = _wide(start)
            return torch.lerp(wide, _wide(end), weight.to(wide.dtype)).to(start.dtype)
    return torch.lerp(start, end, weight)


def addcmul(x: Tensor, a: Tensor, b: Tensor, value: float) -> Tensor:
    """``x + value * a * b``."""
    if not torch.jit.is_scripting():
        if isinstance(value, Tensor):
            wide = _wide(x)
            return (wide + value.to(wide.dtype) * (_wide(a) * _wide(b))).to(x.dtype)
    return torch.addcmul(x, a, b, value=value)


def addcdiv(x: Tensor, numerator: Tensor, denominator: Tensor, value: float) -> Tensor:
    """``x + value * numerator / denominator``."""
    if not torch.jit.is_scripting():
        if isinstance(value, Tensor):
            wide = _wide(x)
            quotient = _wide(numerator) / _wide(denominator)
            return (wide + value.to(wide.dtype) * quotient).to(x.dtype)
    return torch.addcdiv(x, numerator, denominator, value=value)


def clamp(x: Tensor, low: float, high: float) -> Tensor:
    """``min(max(x, low), high)``; NaN stays NaN."""
    if not torch.jit.is_scripting():
        if any(isinstance(bound, Tensor) for bound in (low, high)):
            return torch.minimum(torch.maximum(x, beside(x, low)), beside(x, high))
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
            return torch.where(step == 1, beside(step, first), beside(step, later))
    if step == 1.0:
        return first
    return later


def _wide(x: Tensor) -> Tensor:
    """The tensor; in float32, if it is of 16-bit floats."""
    return x.to(torch.float32) if x.dtype in (torch.bfloat16, torch.float16) else x


def beside(x: Tensor, number: Any) -> Tensor:
    """A number as a 0-d tensor of the dtype of ``x``, made on its device: nothing travels there."""
    return number.to(x.dtype) if isinstance(number, Tensor) else x.new_full((), number)


def is_active(value: float) -> bool:
    """Whether a number does anything; a tensor or a schedule is taken to."""
    if not torch.jit.is_scripting():
        if not isinstance(value, float):
            return True
    return value != 0.0
