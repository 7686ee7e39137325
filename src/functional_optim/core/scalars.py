"""Scalars in 0-d tensors: their value, and products rounded as torch rounds them.

A 0-d float32 tensor times a number is computed in float32; in 16 bits it is computed in float32
and rounded once more. Some rules multiply a scalar that was read from a tensor by a number that
depends on the shape of a parameter. :func:`product_in` and :func:`quotient_in` return a float with
the bits of the tensor's product. They use additions and multiplications only, so that a graph can
record them.
"""

from typing import Any

import torch
from torch import Tensor

from functional_optim._torch.derivatives import is_functorch_wrapped_tensor


def concrete(value: Tensor) -> float | None:
    """Return the number in a 0-d tensor, or None if torch.func or a compiler hides it."""
    if torch.compiler.is_compiling():
        return None
    try:
        return float(value.item())
    except RuntimeError:
        return None


def carries_derivative(value: Tensor) -> bool:
    """Return True if autograd or torch.func tracks the tensor, so that it must stay a tensor.

    Always True while torch.compile or torch.export traces: a program must work for every value.
    """
    if torch.compiler.is_compiling():
        return True
    if value.requires_grad or is_functorch_wrapped_tensor(value):
        return True
    return torch.autograd.forward_ad.unpack_dual(value).tangent is not None


def scalar_dtype(value: Any) -> str:
    """Return the name of the dtype in which torch multiplies a hyper-parameter by a number.

    It is "float64" for a number, and for a tensor that autograd or torch.func tracks.
    """
    if not torch.jit.is_scripting():  # noqa: SIM102  TorchScript skips this condition alone
        if isinstance(value, Tensor) and not carries_derivative(value):
            return str(torch.result_type(value, 1.0)).removeprefix("torch.")
    return "float64"


def product_in(x: float, y: float, dtype: str) -> float:
    """Return ``x * y`` as torch computes it with ``x`` in a 0-d tensor."""
    if dtype == "float64":
        return x * y
    return _round_to(x * _round(y, 24, 2.0**-126), dtype)


def quotient_in(x: float, y: float, dtype: str) -> float:
    """Return ``x / y`` as torch computes it with ``x`` in a 0-d tensor."""
    if dtype == "float64":
        return x / y
    return _round_to(x / _round(y, 24, 2.0**-126), dtype)


def _round_to(x: float, dtype: str) -> float:
    """Round a float64 result to float32, and then to a 16-bit dtype."""
    narrow = _round(x, 24, 2.0**-126)
    if dtype == "bfloat16":
        return _round(narrow, 8, 2.0**-126)
    if dtype == "float16":
        return _round(narrow, 11, 2.0**-14)
    return narrow


def _round(x: float, bits: int, least: float) -> float:
    """Round a number to a binary float with ``bits`` significant bits, to nearest, ties to even.

    ``unit`` is the power of two at or below ``|x|``, or ``least``, the smallest normal number, if
    ``least`` is larger. See Rump, "Fast and accurate summation of floating-point numbers", 2008.
    Adding and subtracting a large multiple of ``unit`` drops the lower bits of ``x``.
    """
    scaled = (2.0**52 + 1.0) * x
    unit = scaled - (1.0 - 2.0**-53) * scaled
    if torch.jit.is_scripting():
        unit = max(abs(unit), least)
    else:  # a traced stand-in for a number has no abs and no max
        unit = (unit * unit) ** 0.5
        unit = unit + (unit < least) * (least - unit)
    large = 1.5 * 2.0 ** (53 - bits) * unit
    return (large + x) - large


def default_scalar_dtype() -> torch.dtype:
    """Return the dtype of torch.optim's state that is one number for a parameter."""
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
