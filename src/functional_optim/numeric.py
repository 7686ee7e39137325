"""Arithmetic with a scalar that is a number or a 0-d tensor.

A number is passed to torch's own scalar argument (``alpha=``, ``value=``): one kernel, with the
bits of torch.optim. A 0-d tensor is broadcast instead, so that it can have a derivative, or be an
argument of vmap. TorchScript compiles only the branch for numbers.

The scalar never changes the dtype of a result, not even for 0-d parameters. For 16-bit tensors the
operation is computed in float32, like torch's kernels with a scalar argument. Only in
``x + offset`` on the CPU do these kernels round the scalar to 16 bits.
"""

import math
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from functional_optim.core.recording import is_recorded, record_call
from functional_optim.core.scalars import carries_derivative, concrete

_Record = TypeVar("_Record", bound=tuple[Any, ...])


def add(x: Tensor, y: Tensor, alpha: float) -> Tensor:
    """Return ``x + alpha * y``.

    Args:
        x: a tensor of any shape.
        y: a tensor that broadcasts with ``x``.
        alpha: a number, or a 0-d tensor.

    Example::

        >>> add(torch.ones(2), torch.ones(2), -0.5)
        tensor([0.5000, 0.5000])
    """
    if isinstance(alpha, Tensor):
        x, y, alpha, dtype = _wide(alpha, x, y)
        return _rounded(x + alpha * y, dtype)
    return torch.add(x, y, alpha=alpha)


def mul(x: Tensor, factor: float) -> Tensor:
    """Return ``factor * x``.

    Example::

        >>> mul(torch.ones(2), 0.5)
        tensor([0.5000, 0.5000])
    """
    if isinstance(factor, Tensor):
        x, factor, dtype = _wide(factor, x)
        return _rounded(x * factor, dtype)
    return x * factor


def div(x: Tensor, divisor: float) -> Tensor:
    """Return ``x / divisor``.

    Example::

        >>> div(torch.ones(2), 2.0)
        tensor([0.5000, 0.5000])
    """
    if isinstance(divisor, Tensor):
        x, divisor, dtype = _wide(divisor, x)
        return _rounded(x / divisor, dtype)
    return x / divisor


def shift(x: Tensor, offset: float) -> Tensor:
    """Return ``x + offset``, for example ``sqrt(v) + eps``.

    Example::

        >>> shift(torch.zeros(2), 0.5)
        tensor([0.5000, 0.5000])
    """
    if isinstance(offset, Tensor):
        if x.dtype in _SHORT and x.is_cuda:  # torch's kernels round an offset on the CPU only
            return (x.to(torch.float32) + offset.to(torch.float32)).to(x.dtype)
        return x + offset.to(x.dtype)
    return x + offset


def lerp(start: Tensor, end: Tensor, weight: float) -> Tensor:
    """Return ``start + weight * (end - start)``, as for a moving average.

    Example::

        >>> lerp(torch.zeros(2), torch.ones(2), 0.25)
        tensor([0.2500, 0.2500])
    """
    if isinstance(weight, Tensor):
        start, end, weight, dtype = _wide(weight, start, end)
        return _rounded(torch.lerp(start, end, weight), dtype)
    return torch.lerp(start, end, weight)


def addcmul(x: Tensor, a: Tensor, b: Tensor, value: float) -> Tensor:
    """Return ``x + value * a * b``, as for an average of squares.

    Example::

        >>> addcmul(torch.zeros(2), torch.ones(2), torch.full((2,), 3.0), 0.5)
        tensor([1.5000, 1.5000])
    """
    if isinstance(value, Tensor):
        x, a, b, value, dtype = _wide(value, x, a, b)
        return _rounded(x + (value * a) * b, dtype)  # in this order: a * b may be too large
    return torch.addcmul(x, a, b, value=value)


def addcdiv(x: Tensor, numerator: Tensor, denominator: Tensor, value: float) -> Tensor:
    """Return ``x + value * numerator / denominator``.

    Example::

        >>> addcdiv(torch.ones(2), torch.ones(2), torch.full((2,), 2.0), -1.0)
        tensor([0.5000, 0.5000])
    """
    if isinstance(value, Tensor):
        x, numerator, denominator, value, dtype = _wide(value, x, numerator, denominator)
        return _rounded(x + (value * numerator) / denominator, dtype)
    return torch.addcdiv(x, numerator, denominator, value=value)


def addmm(x: Tensor, a: Tensor, b: Tensor, beta: float, alpha: float) -> Tensor:
    """Return ``beta * x + alpha * (a @ b)``, for matrices or stacks of matrices.

    Args:
        x: a matrix ``(m, n)``, or a stack ``(k, m, n)``.
        a: ``(m, p)`` or ``(k, m, p)``.
        b: ``(p, n)`` or ``(k, p, n)``.
        beta: a number, or a 0-d tensor.
        alpha: a number, or a 0-d tensor.

    Example::

        >>> addmm(torch.eye(2), torch.eye(2), torch.eye(2), 1.0, 0.5)
        tensor([[1.5000, 0.0000],
                [0.0000, 1.5000]])
    """
    if isinstance(beta, Tensor) or isinstance(alpha, Tensor):  # type: ignore[redundant-expr]
        if x.dtype in _SHORT and x.is_cpu:  # torch rounds once here, and twice on other devices
            x32, a32, b32 = (one.to(torch.float32) for one in (x, a, b))
            return add(mul(x32, beta), a32 @ b32, alpha).to(x.dtype)
        return add(mul(x, beta), a @ b, alpha)
    if x.dim() == 2:
        return torch.addmm(x, a, b, beta=beta, alpha=alpha)
    return torch.baddbmm(x, a, b, beta=beta, alpha=alpha)


def clamp(x: Tensor, low: float, high: float) -> Tensor:
    """Return ``min(max(x, low), high)``. NaN stays NaN.

    Example::

        >>> clamp(torch.tensor([-2.0, 0.5]), -1.0, 1.0)
        tensor([-1.0000,  0.5000])
    """
    if isinstance(low, Tensor) or isinstance(high, Tensor):  # type: ignore[redundant-expr]
        return torch.minimum(torch.maximum(x, beside(x, low)), beside(x, high))
    return torch.clamp(x, low, high)


def power(x: Tensor, exponent: float) -> Tensor:
    """Return ``x ** exponent``.

    Example::

        >>> power(torch.tensor([4.0]), 0.5)
        tensor([2.])
    """
    if isinstance(exponent, Tensor):
        return torch.pow(x, beside(x, exponent))
    return torch.pow(x, exponent)


def select(x: Tensor, mask: Tensor, value: float) -> Tensor:
    """Return ``value`` where ``mask`` is True, else ``x``.

    Args:
        x: a tensor.
        mask: a bool tensor of the same shape.
        value: a number, or a 0-d tensor.

    Example::

        >>> select(torch.ones(2), torch.tensor([True, False]), 0.0)
        tensor([0., 1.])
    """
    if isinstance(value, Tensor):
        return torch.where(mask, value.to(x.dtype), x)
    return x.masked_fill(mask, value)


def mask_like(x: Tensor, condition: float) -> Tensor:
    """Return a bool mask like ``x``: True everywhere, or False everywhere if ``condition`` is 0.

    With :func:`torch.where`, the same program serves steps with and without an update. A product
    with a coefficient that is 0 would turn an infinity into NaN.

    Example::

        >>> mask_like(torch.ones(2), 0.0)
        tensor([False, False])
    """
    if isinstance(condition, Tensor):
        return torch.zeros_like(x, dtype=torch.bool) | (condition != 0)
    return torch.full_like(x, condition, dtype=torch.bool)


def fill_like(x: Tensor, value: Any) -> Tensor:
    """Return a tensor like ``x`` (shape, dtype, device and strides), filled with ``value``.

    If ``value`` is a schedule, its first value is used, for use in ``init``.

    Example::

        >>> fill_like(torch.zeros(2), 0.1)
        tensor([0.1000, 0.1000])
    """
    if isinstance(value, Tensor):
        return torch.zeros_like(x) + value.to(x.dtype)
    if callable(value):
        return fill_like(x, value(0))
    return torch.full_like(x, value)


def at_first_step(step: float, first: float, later: float) -> float:
    """Return ``first`` if ``step`` is 1, else ``later``. ``step`` may be a 0-d or batched tensor.

    Example::

        >>> at_first_step(1.0, 0.0, 0.9), at_first_step(2.0, 0.0, 0.9)
        (0.0, 0.9)
    """
    if isinstance(step, Tensor):
        return torch.where(step == 1, beside(step, first), beside(step, later))
    if step == 1.0:
        return first
    return later


def above(x: float, bound: float, yes: float, no: float) -> float:
    """Return ``yes`` if ``x > bound``, else ``no``. Each argument may be a 0-d or batched tensor.

    Example::

        >>> above(2.0, 1.0, 0.5, 0.0)
        0.5
    """
    if not torch.jit.is_scripting():
        if is_recorded(x):
            return cast("float", record_call(above, x, bound, yes, no))
    is_above = x > bound
    if isinstance(is_above, Tensor):
        wide = is_above.new_empty((), dtype=torch.float64)
        return torch.where(is_above, beside(wide, yes), beside(wide, no))
    if is_above:
        return yes
    return no


def root(x: float) -> float:
    """Return the correctly rounded square root. ``x ** 0.5`` may round differently."""
    if isinstance(x, Tensor):
        return x.sqrt()
    return math.sqrt(x)


KEEPS_NUMBER = "it keeps a number for a whole parameter, and reads it in each step"
"""Reason why a rule that reads such a number has no compiled loop over elements."""


def number(x: Tensor) -> float:
    """Return the number in a 0-d tensor of a state, as a coefficient in double precision.

    The result is a 0-d tensor of double precision if a derivative with respect to ``x`` is needed,
    or if torch.func or a compiler hides its value.

    Raises:
        TypeError: ``x`` is a proxy for a tensor of any shape, while a kernel is compiled.

    Example::

        >>> number(torch.tensor(0.5))
        0.5
    """
    if torch.jit.is_scripting():
        return float(x.item())
    if not isinstance(x, Tensor):
        if is_recorded(x):
            return cast("float", record_call(number, x))
        raise TypeError(KEEPS_NUMBER)
    if x.is_meta:
        return 0.5  # of a graph that is tried without data
    known = None if carries_derivative(x) else concrete(x)
    return cast("float", x.to(torch.float64) if known is None else known)


_SHORT = (torch.bfloat16, torch.float16)


def _wide(number: Tensor, *tensors: Tensor) -> Any:
    """Convert tensors and a number to the dtype that torch's kernels compute in.

    The last value returned is the dtype to round the result to, or None if no rounding is needed.
    """
    dtype = tensors[0].dtype
    for one in tensors[1:]:
        dtype = torch.promote_types(dtype, one.dtype)
    if dtype not in _SHORT:
        # Convert explicitly: a product of a 16-bit tensor and a 0-d number is rounded to 16 bits.
        own = [one.to(dtype) if one.dtype in _SHORT else one for one in tensors]
        return (*own, number.to(dtype), None)
    wide = [one.to(torch.float32) for one in tensors]
    return (*wide, number.to(torch.float32), dtype)


def _rounded(result: Tensor, dtype: torch.dtype | None) -> Tensor:
    return result if dtype is None else result.to(dtype)


def beside(x: Tensor, number: Any) -> Tensor:
    """Return a number as a 0-d tensor of the dtype of ``x``, created on the device of ``x``.

    Example::

        >>> beside(torch.zeros(2, dtype=torch.float64), 0.5)
        tensor(0.5000, dtype=torch.float64)
    """
    return number.to(x.dtype) if isinstance(number, Tensor) else x.new_full((), number)


def is_active(value: Any) -> bool:
    """Return True if a number is not 0. Tensors and schedules count as active.

    Use it in the constructor of an optimizer, to leave out a stage whose option is 0.

    Example::

        >>> is_active(0), is_active(0.1), is_active(torch.tensor(0.0))
        (False, True, True)
    """
    return bool(value != 0.0) if isinstance(value, (int, float)) else True


def choose(condition: Any, yes: Any, no: Any) -> Any:
    """Return ``yes`` if a condition is True, else ``no``: numbers, or 0-d tensors.

    The condition may be a 0-d bool tensor, or a batched tensor whose value torch.func hides. Then
    both values are used in ``torch.where``.
    """
    if isinstance(condition, Tensor):
        known = concrete(condition)
        if known is None:
            like: Any = {"dtype": torch.float64, "device": condition.device}
            wide = [torch.as_tensor(one, **like) for one in (yes, no)]
            return torch.where(condition, *wide)
        condition = known != 0.0
    return yes if condition else no


def choose_record(condition: Any, yes: _Record, no: _Record) -> _Record:
    """Return a named tuple with the fields of ``yes`` or ``no``, as :func:`choose` does."""
    if isinstance(condition, Tensor):
        return type(yes)(*map(partial(choose, condition), yes, no))
    return yes if condition else no


def larger(x: Any, y: Any) -> Any:
    """Return the larger of two numbers, or ``x`` if ``y`` is NaN."""
    is_larger = y > x
    if isinstance(is_larger, Tensor):
        return choose(is_larger, y, x)
    return y if is_larger else x


def smaller(x: Any, y: Any) -> Any:
    """Return the smaller of two numbers, or ``x`` if ``y`` is NaN."""
    return choose(y < x, y, x)


def may_hold(condition: Any) -> bool:
    """Return True if a condition is True, or is a tensor whose value torch.func hides."""
    if isinstance(condition, Tensor):
        return concrete(condition) != 0.0
    return bool(condition)
