"""torch's functions, called one by one, of a number that stands in a 0-d tensor.

They do with it what they do with the number itself. The forms that a compiler gets
(:mod:`~functional_optim.kernels.lowering`) would not, of 16-bit floats: what is in between stays
in float32 there, and would be rounded here, and so would the number: 0.999 is 1 in bfloat16.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from functional_optim import numeric
from functional_optim.kernels import lowering

_SHORT = (torch.bfloat16, torch.float16)
_PRODUCTS = frozenset(
    ["mul", "multiply", "div", "divide", "true_divide", "__mul__", "__rmul__", "__truediv__"]
)


def _add(x: Any, y: Any, *, alpha: Any = 1, **options: Any) -> Any:
    if not isinstance(alpha, Tensor):
        return torch.add(x, y, alpha=alpha, **options)
    both = isinstance(x, Tensor) and isinstance(y, Tensor)
    return numeric.add(x, y, alpha) if both else lowering.add(x, y, alpha)  # type: ignore[arg-type]  # a number


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


_FORMS: dict[str, Callable[..., Any]] = {
    **lowering.LOWERED,
    "add": _add,
    "sub": _sub,
    "rsub": _rsub,
    "lerp": _lerp,
    "addcmul": _addcmul,
    "addcdiv": _addcdiv,
}


class OnTensors(TorchFunctionMode):
    """torch's functions take a 0-d tensor of double precision for the number in it."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = getattr(function, "__name__", ""), kwargs or {}
        if name in _PRODUCTS and len(args) == 2 and not kwargs:
            return _product(function, *args)
        form = _FORMS.get(name)
        if form is not None and lowering.is_torchs(function, name) and "out" not in kwargs:
            return form(*args, **kwargs)
        return function(*args, **kwargs)


def _product(function: Any, a: Any, b: Any) -> Any:
    """A product or quotient; of 16-bit floats and a number in double precision, as torch's are."""
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
