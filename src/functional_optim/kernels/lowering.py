"""torch's functions with a number, for numbers that are stored in 0-d tensors.

A compiled step takes the numbers that change with the step as elements of one small tensor, so a
new value compiles nothing. torch's own functions need Python numbers for some of their arguments,
such as ``alpha`` and ``value``. The functions here take 0-d tensors there, and are compiled instead
of torch's. Each function computes what torch documents for the function of the same name.
:class:`TensorScalarMode` replaces functions that are called eagerly.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from functional_optim import numeric
from functional_optim.numeric import beside

Scalar = float | Tensor

_SHORT = (torch.bfloat16, torch.float16)
_PRODUCTS = frozenset(
    ["mul", "multiply", "div", "divide", "true_divide", "__mul__", "__rmul__", "__truediv__"]
)


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
    """``start + weight * (end - start)``, computed from the nearer end."""
    difference = end - start
    near = start + weight * difference
    far = end - difference * (1 - weight)
    if not isinstance(weight, Tensor):
        return near if abs(weight) < 0.5 else far
    return torch.where(weight.abs() < 0.5, near, far)


def addcmul(x: Tensor, a: Tensor, b: Tensor, value: Scalar = 1) -> Tensor:
    """``x + value * a * b``."""
    return x + (value * a) * b  # a * b may overflow


def addcdiv(x: Tensor, a: Tensor, b: Tensor, value: Scalar = 1) -> Tensor:
    """``x + value * a / b``."""
    return x + (value * a) / b


def clamp(x: Tensor, min: Any = None, max: Any = None) -> Tensor:  # noqa: A002  torch's names
    """``x`` limited to two bounds, each a number, a tensor or None. NaN stays NaN."""
    if isinstance(min, Tensor) or isinstance(max, Tensor):
        x = x if min is None else torch.maximum(x, beside(x, min))
        return x if max is None else torch.minimum(x, beside(x, max))
    return torch.clamp(x, min, max)


def masked_fill(x: Tensor, mask: Tensor, value: Scalar) -> Tensor:
    """``value`` where ``mask`` is True, else ``x``."""
    if isinstance(value, Tensor):
        return torch.where(mask, value.to(x.dtype), x)
    return x.masked_fill(mask, value)


def full_like(x: Tensor, fill_value: Scalar, **options: Any) -> Tensor:
    """A tensor like ``x``, filled with one value."""
    if isinstance(fill_value, Tensor):
        return torch.zeros_like(x, **options) + fill_value.to(options.get("dtype", x.dtype))
    return torch.full_like(x, fill_value, **options)


def where(condition: Tensor, x: Any, y: Any) -> Tensor:
    """Return ``x`` where the condition is True, else ``y``.

    A 0-d tensor is converted to the dtype of the other tensor.
    """
    if isinstance(x, Tensor) and isinstance(y, Tensor) and x.dtype != y.dtype:
        if x.dim() == 0:
            x = x.to(y.dtype)
        elif y.dim() == 0:
            y = y.to(x.dtype)
    return torch.where(condition, x, y)


def copy_values(x: Tensor) -> Tensor:
    """Return a copy of ``x``, to be read after ``x`` is overwritten."""
    # Inductor drops a clone, and then reads ``x`` after the write.
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
"""The functions that are compiled instead of torch's functions and methods of these names."""


def is_torch_function(function: Any, name: str) -> bool:
    """Return True if a function is torch's function or method of this name."""
    return function in (getattr(torch, name, None), getattr(Tensor, name, None))


class LoweringMode(TorchFunctionMode):
    """Mode in which torch's functions accept 0-d tensors instead of numbers, for compilation."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name in LOWERED and is_torch_function(function, name):
            function = LOWERED[name]
        return function(*args, **(kwargs or {}))


def _add(x: Any, y: Any, *, alpha: Any = 1, **options: Any) -> Any:
    if not isinstance(alpha, Tensor):
        return torch.add(x, y, alpha=alpha, **options)
    both = isinstance(x, Tensor) and isinstance(y, Tensor)
    return numeric.add(x, y, alpha) if both else add(x, y, alpha)  # type: ignore[arg-type]  # a number


def _sub(x: Any, y: Any, *, alpha: Any = 1, **options: Any) -> Any:
    if not isinstance(alpha, Tensor):
        return torch.sub(x, y, alpha=alpha, **options)
    return _add(x, y, alpha=-alpha)


def _rsub(x: Any, y: Any, *, alpha: Any = 1) -> Any:
    return _add(y, x, alpha=-alpha) if isinstance(alpha, Tensor) else torch.rsub(x, y, alpha=alpha)


def _lerp(start: Tensor, end: Tensor, weight: Any, **options: Any) -> Tensor:
    if isinstance(weight, Tensor) and weight.dim() == 0:
        return numeric.lerp(start, end, weight)  # type: ignore[arg-type]  # a number
    return torch.lerp(start, end, weight, **options)


def _addcmul(x: Tensor, a: Tensor, b: Tensor, *, value: Any = 1, **options: Any) -> Tensor:
    if isinstance(value, Tensor):
        return numeric.addcmul(x, a, b, value)  # type: ignore[arg-type]  # a number
    return torch.addcmul(x, a, b, value=value, **options)


def _addcdiv(x: Tensor, a: Tensor, b: Tensor, *, value: Any = 1, **options: Any) -> Tensor:
    if isinstance(value, Tensor):
        return numeric.addcdiv(x, a, b, value)  # type: ignore[arg-type]  # a number
    return torch.addcdiv(x, a, b, value=value, **options)


_SCALAR_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **LOWERED,
    "add": _add,
    "sub": _sub,
    "rsub": _rsub,
    "lerp": _lerp,
    "addcmul": _addcmul,
    "addcdiv": _addcdiv,
}


class TensorScalarMode(TorchFunctionMode):
    """Mode in which torch's functions treat a 0-d float64 tensor as the number in it.

    Each function is called eagerly, and gives the bits that it gives for the number itself. The
    functions in :data:`LOWERED` would not for 16-bit floats: they rely on a compiler that keeps
    intermediate results in float32. Called eagerly, they would round intermediate results and the
    number, and 0.999 is 1 in bfloat16.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = getattr(function, "__name__", ""), kwargs or {}
        if name in _PRODUCTS and len(args) == 2 and not kwargs:
            return _product(function, *args)
        replacement = _SCALAR_FUNCTIONS.get(name)
        if replacement is not None and is_torch_function(function, name) and "out" not in kwargs:
            return replacement(*args, **kwargs)
        return function(*args, **kwargs)


def _product(function: Any, a: Any, b: Any) -> Any:
    """Return a product or quotient. 16-bit tensors and a float64 number meet in float32."""
    for short, number in ((a, b), (b, a)):
        if (
            isinstance(short, Tensor)
            and isinstance(number, Tensor)
            and short.dtype in _SHORT
            and number.dim() == 0
            and number.dtype == torch.float64
        ):
            wide = (one.to(torch.float32) for one in (a, b))
            return function(*wide).to(short.dtype)
    return function(a, b)
