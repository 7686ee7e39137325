"""Products of a tensor hyper-parameter and a number, rounded as torch rounds them.

A 0-d float32 tensor times a number is computed in float32; in 16 bits it is computed in float32
and rounded once more. Rules multiply by numbers that depend on the shape of a parameter, after the
tensor has become a float. These functions give that float the bits of the tensor's product, by
additions and multiplications alone, so that a graph can record them.
"""

from typing import Any

import torch
from torch import Tensor

from functional_optim.core.scalars import carries_derivative


def scalar_dtype(value: Any) -> str:
    """Return the name of the dtype in which torch multiplies a hyper-parameter by a number.

    Args:
        value: a number, or a 0-d tensor.

    Returns:
        "float64" for a number, and for a tensor that autograd or torch.func follows.

    Example::

        >>> scalar_dtype(0.1), scalar_dtype(torch.tensor(0.1))
        ('float64', 'float32')
    """
    if not torch.jit.is_scripting():  # noqa: SIM102  TorchScript skips this condition alone
        if isinstance(value, Tensor) and not carries_derivative(value):
            return str(torch.result_type(value, 1.0)).removeprefix("torch.")
    return "float64"


def product_in(x: float, y: float, dtype: str) -> float:
    """Return ``x * y`` as torch computes it with ``x`` in a 0-d tensor.

    Args:
        x: a number of the dtype.
        y: any number.
        dtype: as :func:`scalar_dtype` names it.

    Example::

        >>> x = torch.tensor(0.3)
        >>> product_in(x.item(), 1.7, "float32") == (x * 1.7).item()
        True
    """
    if dtype == "float64":
        return x * y
    return _rounded_to(x * _rounded(y, 24, 2.0**-126), dtype)


def quotient_in(x: float, y: float, dtype: str) -> float:
    """Return ``x / y`` as torch computes it with ``x`` in a 0-d tensor.

    Args:
        x: a number of the dtype.
        y: any number.
        dtype: as :func:`scalar_dtype` names it.

    Example::

        >>> x = torch.tensor(0.3)
        >>> quotient_in(x.item(), 1.7, "float32") == (x / 1.7).item()
        True
    """
    if dtype == "float64":
        return x / y
    return _rounded_to(x / _rounded(y, 24, 2.0**-126), dtype)


def _rounded_to(x: float, dtype: str) -> float:
    """Round a result in double precision to float32, and to 16 bits after that."""
    narrow = _rounded(x, 24, 2.0**-126)
    if dtype == "bfloat16":
        return _rounded(narrow, 8, 2.0**-126)
    if dtype == "float16":
        return _rounded(narrow, 11, 2.0**-14)
    return narrow


def _rounded(x: float, bits: int, least: float) -> float:
    """Round a number to a binary float of so many bits, to nearest, ties to even.

    ``unit`` is the power of two at or below ``|x|`` (Rump, "Fast and accurate summation of
    floating-point numbers", 2008), but ``least``, the least normal number, where that is larger.
    Beside 1.5 times a large multiple of it, only the wanted bits of ``x`` remain.
    """
    scaled = (2.0**52 + 1.0) * x
    unit = scaled - (1.0 - 2.0**-53) * scaled
    if torch.jit.is_scripting():
        unit = max(abs(unit), least)
    else:  # of a stand-in for a number that is being recorded, too
        unit = (unit * unit) ** 0.5
        unit = unit + (unit < least) * (least - unit)
    large = 1.5 * 2.0 ** (53 - bits) * unit
    return (large + x) - large


def default_scalar_dtype() -> torch.dtype:
    """Return the dtype in which torch.optim keeps one number for a parameter.

    Example::

        >>> default_scalar_dtype()
        torch.float32
    """
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
